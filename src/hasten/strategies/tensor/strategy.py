"""Transform that splits layers over tensor-parallel ranks: each rank holds and computes a shard of the weights."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hasten.comm.agreement import agree
from hasten.config.sections.parallel import (
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from hasten.errors import ConfigError
from hasten.extension import load
from hasten.modules import forwarding
from hasten.precision.base import Precision
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh import WorldMesh
from hasten.runtime.mesh_plan import Axis
from hasten.strategies.base import PrepareRequest, Stage
from hasten.strategies.gradient_hooks import refuse_gradient_hooks
from hasten.strategies.tensor.forwards import (
    CommonDropout,
    SplitForward,
    SummedGradients,
    forward_of,
)
from hasten.strategies.tensor.layers import LayerSplit, split_dims
from hasten.strategies.tensor.ops import RankRandomStream
from hasten.strategies.tensor.plan import decide_split
from hasten.strategies.weight_sources import WeightSource, copy_from_rank_0, source_of

log = logging.getLogger(__name__)


class SplitLayers:
    """Transform that splits the layers of a plan over the tensor-parallel axis; the rest is not changed."""

    stage = Stage.TENSOR

    def __init__(
        self,
        parallelism: ParallelismConfig,
        fsdp_config: FullyShardedDataParallelPlugin,
        mesh: WorldMesh,
    ) -> None:
        self._config = parallelism
        self._handler = parallelism.tp_handler
        self._fsdp = fsdp_config
        self._mesh = mesh

    def apply(
        self,
        model: nn.Module,
        request: PrepareRequest,
        ctx: ProcessContext,
        precision: Precision,
    ) -> nn.Module:
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            return model
        if precision.spec == "fp8":
            raise ConfigError(
                "mixed_precision='fp8' replaces linear layers, which is not supported for layers split by tensor parallelism. Use "
                "'bf16', or tp_size=1."
            )
        ranks = ctx.mesh.size(Axis.TP)
        with agree(ctx.world, f"splitting {type(model).__name__}"):
            split = decide_split(
                model,
                self._config.tp_plan,
                self._config.tp_divide,
                ranks,
                experts=ctx.mesh.ep == 1,
            )
            _check_ties(model, split)
            if self._handler.loss_parallel:
                head = _head_of(model, split)
                if (
                    forwarding.find(model.get_submodule(head), forwarding.LateHead.tag)
                    is None
                ):
                    load("public_names", "use_chunked_loss")(model, head)
            refuse_gradient_hooks(model, _unsplit_parameters(model, split))
        if source_of(model, self._fsdp, ctx) is WeightSource.RANK_0:
            _allocate_meta_tensors(model, ctx)
        copy_from_rank_0(model, ctx)
        mesh = self._mesh.mesh_along(ctx, Axis.TP)
        _split_layers(model, split, mesh, ctx.device)
        for parent, values in split.attributes.items():
            vars(model.get_submodule(parent)).update(values)
        for layer in model.modules():
            if isinstance(layer, nn.TransformerEncoderLayer):
                layer.activation_relu_or_gelu = (
                    # otherwise its inference reads whole weights without calling the layers
                    0
                )
        if ctx.is_main:
            log.info(_describe_split(model, split, ranks, self._handler.loss_parallel))
        return model

    def undo(self, model: nn.Module) -> nn.Module:
        return model


def _unsplit_parameters(model: nn.Module, layer_split: LayerSplit) -> set[nn.Parameter]:
    """Return the parameters outside the split layers."""
    split_parameter_ids: set[int] = set()
    for name, style in layer_split.styles.items():
        layer = model.get_submodule(name)
        split_parameter_ids |= {
            id(layer.get_parameter(leaf)) for leaf in split_dims(layer, style)
        }
    unsplit_parameters = set()
    for parameter in model.parameters():
        if id(parameter) not in split_parameter_ids:
            unsplit_parameters.add(parameter)
    return unsplit_parameters


def _allocate_meta_tensors(model: nn.Module, ctx: ProcessContext) -> None:
    """Allocate meta tensors on the ranks that hold no values; the values come from rank 0 afterwards."""

    def allocate_tensor(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return torch.empty_like(tensor, device=ctx.device)
        return tensor

    model._apply(allocate_tensor)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _split_layers(
    model: nn.Module,
    layer_split: LayerSplit,
    device_mesh: DeviceMesh,
    device: torch.device,
) -> None:
    group = device_mesh.get_group()
    rank_stream = RankRandomStream(model, group.rank())
    shards_by_id: dict[int, nn.Parameter] = {}
    for name, style in layer_split.styles.items():
        layer = model.get_submodule(name)
        num_experts = layer_split.numbers.get(name, 1)
        for leaf, dim in split_dims(layer, style).items():
            _replace_by_shard(layer, leaf, dim, device_mesh, shards_by_id, device)
        if style == "experts" and getattr(layer, "num_experts", None) == num_experts:
            layer.num_experts = num_experts // device_mesh.size()  # type: ignore[assignment]  # an int, not a module
        # a layer with two names is split once
        if forwarding.find(layer, SplitForward.tag) is None:
            forwarding.replace(
                layer, forward_of(layer, style, group, rank_stream, num_experts)
            )
    for name in layer_split.common_dropouts:
        forwarding.replace(model.get_submodule(name), CommonDropout(rank_stream))
    for name in layer_split.summed:
        forwarding.replace(model.get_submodule(name), SummedGradients(group))


def _replace_by_shard(
    layer: nn.Module,
    name: str,
    dim: int,
    device_mesh: DeviceMesh,
    shards_by_id: dict[int, nn.Parameter],
    device: torch.device,
) -> None:
    """Replace a parameter by this rank's shard; a tied parameter gets the same shard under all names."""
    whole_parameter = layer.get_parameter(name)
    if isinstance(whole_parameter, DTensor):
        return
    if id(whole_parameter) not in shards_by_id:
        local_shard = (
            whole_parameter.detach()
            .chunk(device_mesh.size(), dim)[device_mesh.get_local_rank()]
            .clone()
        )
        shard = DTensor.from_local(
            local_shard if whole_parameter.is_meta else local_shard.to(device),
            device_mesh,
            [Shard(dim)],
            run_check=False,
            shape=whole_parameter.shape,
            stride=whole_parameter.stride(),
        )
        shards_by_id[id(whole_parameter)] = nn.Parameter(
            shard, requires_grad=whole_parameter.requires_grad
        )
        shards_by_id[id(shards_by_id[id(whole_parameter)])] = shards_by_id[
            id(whole_parameter)
        ]
    setattr(layer, name, shards_by_id[id(whole_parameter)])


def _check_ties(model: nn.Module, layer_split: LayerSplit) -> None:
    """Raise if a tensor with two names would be split differently under each."""
    first_uses: dict[int, tuple[str, int]] = {}
    split_names = {}
    for name, style in layer_split.styles.items():
        for leaf, dim in split_dims(model.get_submodule(name), style).items():
            split_names[f"{name}.{leaf}"] = dim
    for name, parameter in model.named_parameters(remove_duplicate=False):
        dim = split_names.get(name, -1)
        first_name, known_dim = first_uses.setdefault(id(parameter), (name, dim))
        if known_dim != dim:
            raise ConfigError(
                f"{first_name!r} and {name!r} are one tied tensor, but the plan splits them differently, so they would diverge. Split both "
                "layers in the same way (for an embedding and a head: 'embedding_rowwise' and "
                "'colwise_gather_output'), or neither."
            )


def _head_of(model: nn.Module, layer_split: LayerSplit) -> str:
    """Return the one layer that gathers its output, whose logits can stay sharded. Raises: ConfigError unless there is one."""
    heads = []
    for name, style in layer_split.styles.items():
        if style == "colwise_gather_output":
            heads.append(name)
    if len(heads) != 1:
        raise ConfigError(
            f"loss_parallel=True needs one head with sharded logits, but the plan of {type(model).__name__} "
            f"({layer_split.source}) gathers the output of {', '.join(heads) or 'no layer'}; name the one head with "
            "tp_plan={'head': 'colwise_gather_output', ...}, or set loss_parallel=False."
        )
    return heads[0]


def _describe_split(
    model: nn.Module, layer_split: LayerSplit, num_ranks: int, keep_logits: bool
) -> str:
    """Return a summary of the split layers, the layers left whole, and the bytes on each rank."""
    by_style: dict[str, int] = {}
    for style in layer_split.styles.values():
        by_style[style] = by_style.get(style, 0) + 1
    split_bytes = 0
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            split_bytes += parameter.numel() * parameter.element_size()
    whole_bytes = 0
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            whole_bytes += parameter.numel() * parameter.element_size()
    text = (
        f"{type(model).__name__} is split over tp {num_ranks} ({layer_split.source}): "
        + ", ".join(f"{count} {style}" for style, count in sorted(by_style.items()))
        + f"; each rank holds {(split_bytes / num_ranks + whole_bytes) / 2**20:.1f} of "
        f"{(split_bytes + whole_bytes) / 2**20:.1f} MiB"
    )
    if keep_logits:
        text += "; logits stay sharded for the loss"
    if layer_split.summed:
        text += f"; gradients summed over tp: {', '.join(layer_split.summed[:8])}"
    if layer_split.attributes:
        divided_names = []
        for name, attributes in layer_split.attributes.items():
            divided_names += [f"{name}.{attribute}" for attribute in attributes]
        text += f"; divided: {', '.join(divided_names)}"
    if layer_split.left:
        text += "; not split: " + ", ".join(
            f"{name} ({reason})" for name, reason in list(layer_split.left.items())[:8]
        )
    return text
