"""The transform that splits layers over the tensor-parallel ranks: each holds a part of the weights and computes it."""

from __future__ import annotations

import logging
from typing import Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from hasten.comm.agreement import agree
from hasten.config.parallel import ParallelismConfig, TensorStyle
from hasten.config.sharding import FullyShardedDataParallelPlugin
from hasten.errors import ConfigError, StepError
from hasten.modules import forwarding
from hasten.precision.base import Precision
from hasten.runtime.axes import Axis
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh import WorldMesh
from hasten.strategies import tensor_sequence
from hasten.strategies.base import Stage, Wish
from hasten.strategies.filling import Source, copy_from_rank_0, source_of
from hasten.strategies.gradient_hooks import carry_hooks, hooks_to_carry, refuse_gradient_hooks
from hasten.strategies.tensor_logits import VocabularyParts
from hasten.strategies.tensor_ops import enter, gather, leave, split
from hasten.strategies.tensor_plan import Split, decide
from hasten.strategies.tensor_random import ApartStream
from hasten.strategies.tensor_sequence import SequenceRegion

log = logging.getLogger(__name__)

_WEIGHT_DIMS: Final = (
    ("colwise", 0),
    ("colwise_gather_output", 0),
    ("rowwise", 1),
    ("rowwise_split_input", 1),
    ("embedding_rowwise", 0),
    ("embedding_colwise", 1),
)


class _SplitForward(forwarding.Forward):
    """The forward of a layer of which this rank holds a part."""

    tag = "tensor"

    def __init__(self, group: dist.ProcessGroup, apart: ApartStream, region: SequenceRegion | None = None) -> None:
        self.group = group
        self.apart = apart
        self.region = region
        """Where ranks hold parts of the tokens around this layer; None where every rank has all of them."""

    def part(self, name: str) -> Tensor | None:
        """This rank's part of a parameter, differentiable; None when the layer has none of that name."""
        value: Tensor | None = getattr(self.module, name)
        return value.to_local() if isinstance(value, DTensor) else value


class Colwise(_SplitForward):
    """Computes this rank's output features from the whole input."""

    output: Literal["part", "whole", "logits"] = "part"
    gathered = False
    """Whether the module around this layer has gathered the tokens already."""

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.part("weight")
        assert weight is not None, "a linear layer has a weight"
        if self.region is None:
            x = enter(x, self.group)
        elif not self.gathered:
            x = self.region.gathered(x)
        out = F.linear(x, weight, self.part("bias"))
        if self.output == "whole":
            return gather(out, -1, self.group)
        if self.output == "logits":
            return VocabularyParts.around(out, self.group)
        self.apart.begin(self.module)
        return out


class Rowwise(_SplitForward):
    """Computes what this rank's input features add to the output; the ranks' results are summed."""

    whole_input = False

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.part("weight"), self.part("bias")
        assert weight is not None, "a linear layer has a weight"
        if self.region is not None:
            if x.shape[-1] != weight.shape[-1]:
                raise StepError(
                    f"a layer split rowwise got {x.shape[-1]} features instead of {weight.shape[-1]}: with "
                    "sequence_parallel the hidden states of a block are a part of the tokens, and the projections give "
                    "all of them. Take the number of tokens from a projection's output, as in "
                    "`projected.unflatten(-1, (-1, head_dim))`, or set sequence_parallel=False."
                )
            out = self.region.scattered(F.linear(x, weight))
            return out if bias is None else out + enter(bias, self.group).to(out.dtype)
        self.apart.end()
        out = leave(F.linear(split(x, -1, self.group) if self.whole_input else x, weight), self.group)
        return out if bias is None else out + bias.to(out.dtype)


class VocabularyRows(_SplitForward):
    """Looks up the tokens whose rows this rank holds; the ranks' results are summed."""

    def __call__(self, tokens: Tensor) -> Tensor:
        weight = self.part("weight")
        assert weight is not None, "an embedding has a table"
        assert isinstance(self.module, nn.Embedding), "the plan was checked"
        first = self.group.rank() * weight.shape[0]
        local = tokens - first
        other = (local < 0) | (local >= weight.shape[0])
        padding = self.module.padding_idx
        mine = None if padding is None or not 0 <= padding - first < weight.shape[0] else padding - first
        rows = F.embedding(local.masked_fill(other, 0), weight, mine, scale_grad_by_freq=False)
        return leave(rows.masked_fill(other.unsqueeze(-1), 0), self.group)


class TableColumns(_SplitForward):
    """Looks up this rank's columns of a table."""

    def __call__(self, tokens: Tensor) -> Tensor:
        weight = self.part("weight")
        assert weight is not None, "an embedding has a table"
        assert isinstance(self.module, nn.Embedding), "the plan was checked"
        return F.embedding(tokens, weight, self.module.padding_idx)


class SplitLayers:
    """Splits the layers a plan names over the tensor-parallel axis and leaves the rest as it is."""

    stage = Stage.TENSOR

    def __init__(self, config: ParallelismConfig, fsdp: FullyShardedDataParallelPlugin, mesh: WorldMesh) -> None:
        self._config = config
        self._handler = config.tp_handler
        self._fsdp = fsdp
        self._mesh = mesh

    def apply(self, model: nn.Module, wish: Wish, ctx: ProcessContext, precision: Precision) -> nn.Module:
        if any(isinstance(p, DTensor) for p in model.parameters()):
            return model
        if precision.spec == "fp8":
            raise ConfigError(
                "mixed_precision='fp8' replaces linear layers, and tensor parallelism computes parts of them; both "
                "cannot act on one layer. Use 'bf16', or tp_size=1."
            )
        ranks = ctx.mesh.size(Axis.TP)
        with agree(ctx.world, f"splitting {type(model).__name__}"):
            found = decide(model, self._config.tp_plan, self._config.tp_divide, ranks)
            _check_ties(model, found)
            stacks = tensor_sequence.check(model, found.styles) if self._handler.sequence_parallel else []
            if self._handler.loss_parallel:
                _check_head(model, found)
            whole = _left_whole(model, found)
            refuse_gradient_hooks(model, whole)
        if source_of(model, self._fsdp, ctx) is Source.RANK_0:
            _materialise(model, ctx)
        copy_from_rank_0(model, ctx)
        mesh = self._mesh.along(ctx, Axis.TP)
        hooks = hooks_to_carry(model, whole)
        _split(model, found, mesh, ctx.device, stacks, self._handler.loss_parallel)
        carry_hooks(model, hooks)
        for parent, names in found.attributes.items():
            module = model.get_submodule(parent)
            for name in names:
                setattr(module, name, getattr(module, name) // ranks)
        if ctx.is_main:
            log.info(_account(model, found, ranks, sum(len(stack) for stack in stacks), self._handler.loss_parallel))
        return model

    def undo(self, model: nn.Module) -> nn.Module:
        return model


def _left_whole(model: nn.Module, found: Split) -> set[nn.Parameter]:
    """The parameters outside the layers that are split."""
    parts = {id(p) for name in found.styles for p in model.get_submodule(name).parameters(recurse=False)}
    return {parameter for parameter in model.parameters() if id(parameter) not in parts}


def _materialise(model: nn.Module, ctx: ProcessContext) -> None:
    """Give meta tensors memory on the ranks that built none; the values come from rank 0 afterwards."""

    def real(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=ctx.device) if tensor.is_meta else tensor

    model._apply(real)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _split(
    model: nn.Module,
    found: Split,
    mesh: DeviceMesh,
    device: torch.device,
    stacks: list[list[tuple[str, nn.Module]]],
    keep_logits: bool,
) -> None:
    group = mesh.get_group()
    apart = ApartStream(model, group.rank())
    regions = tensor_sequence.install(stacks, found.styles, group, apart)
    made: dict[int, nn.Parameter] = {}
    for name, style in found.styles.items():
        layer = model.get_submodule(name)
        dim = dict(_WEIGHT_DIMS)[style]
        _replace(layer, "weight", dim, mesh, made, device)
        if isinstance(layer, nn.Linear) and "bias" in dict(layer.named_parameters(recurse=False)) and dim == 0:
            _replace(layer, "bias", 0, mesh, made, device)
        if forwarding.find(layer, _SplitForward.tag) is None:  # one layer under two names is split once
            forwarding.replace(layer, _forward(style, group, apart, regions.get(name), keep_logits))
    for name in found.summed:
        whole = model.get_submodule(name)
        if forwarding.find(whole, tensor_sequence.PerToken.tag) is None:  # divided tokens do the same
            forwarding.replace(whole, tensor_sequence.PerToken(group))


def _forward(
    style: TensorStyle,
    group: dist.ProcessGroup,
    apart: ApartStream,
    place: tuple[SequenceRegion, bool] | None,
    keep_logits: bool,
) -> _SplitForward:
    region, gathered = place or (None, False)
    match style:
        case "colwise" | "colwise_gather_output":
            colwise = Colwise(group, apart, region)
            colwise.gathered = gathered
            if style == "colwise_gather_output":
                colwise.output = "logits" if keep_logits else "whole"
            return colwise
        case "rowwise" | "rowwise_split_input":
            rowwise = Rowwise(group, apart, region)
            rowwise.whole_input = style == "rowwise_split_input"
            return rowwise
        case "embedding_rowwise":
            return VocabularyRows(group, apart)
        case "embedding_colwise":
            return TableColumns(group, apart)
    raise AssertionError(f"{style} does not split a layer")


def _replace(
    layer: nn.Module, name: str, dim: int, mesh: DeviceMesh, made: dict[int, nn.Parameter], device: torch.device
) -> None:
    """Put this rank's part in the place of a parameter; a tied parameter gets the same part everywhere."""
    whole = layer.get_parameter(name)
    if isinstance(whole, DTensor):
        return
    if id(whole) not in made:
        part = whole.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()
        spread = DTensor.from_local(
            part if whole.is_meta else part.to(device),
            mesh,
            [Shard(dim)],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
        made[id(whole)] = nn.Parameter(spread, requires_grad=whole.requires_grad)
        made[id(made[id(whole)])] = made[id(whole)]
    setattr(layer, name, made[id(whole)])


def _check_ties(model: nn.Module, found: Split) -> None:
    """Raise when one tensor under two names would be split in one place and not, or otherwise, in the other."""
    dims: dict[int, tuple[str, int]] = {}
    wanted = dict(_WEIGHT_DIMS)
    split_names = {}
    for name, style in found.styles.items():
        for leaf in ("weight", "bias"):
            if leaf == "weight" or wanted[style] == 0:
                split_names[f"{name}.{leaf}"] = wanted[style] if leaf == "weight" else 0
    for name, parameter in model.named_parameters(remove_duplicate=False):
        dim = split_names.get(name, -1)
        first, known = dims.setdefault(id(parameter), (name, dim))
        if known != dim:
            raise ConfigError(
                f"{first!r} and {name!r} are one tied tensor, but the plan splits them differently, and they would "
                "drift apart. Split both layers alike (for an embedding and a head: 'embedding_rowwise' and "
                "'colwise_gather_output'), or neither."
            )


def _check_head(model: nn.Module, found: Split) -> None:
    """Raise unless one layer, the head, gathers its output: then its logits can stay apart."""
    heads = [name for name, style in found.styles.items() if style == "colwise_gather_output"]
    if len(heads) != 1:
        raise ConfigError(
            f"loss_parallel=True keeps the logits of the head apart, but the plan of {type(model).__name__} "
            f"({found.source}) gathers the output of {', '.join(heads) or 'no layer'}; name the one head with "
            "tp_plan={'head': 'colwise_gather_output', ...}, or set loss_parallel=False."
        )


def _account(model: nn.Module, found: Split, ranks: int, num_blocks: int, keep_logits: bool) -> str:
    """What was split, what was left, and the bytes a rank holds."""
    by_style: dict[str, int] = {}
    for style in found.styles.values():
        by_style[style] = by_style.get(style, 0) + 1
    split_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if isinstance(p, DTensor))
    whole_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if not isinstance(p, DTensor))
    text = (
        f"{type(model).__name__} is split over tp {ranks} ({found.source}): "
        + ", ".join(f"{count} {style}" for style, count in sorted(by_style.items()))
        + f"; each rank holds {(split_bytes / ranks + whole_bytes) / 2**20:.1f} of "
        f"{(split_bytes + whole_bytes) / 2**20:.1f} MiB"
    )
    if num_blocks:
        text += f"; tokens divided between the split layers of {num_blocks} blocks"
    if keep_logits:
        text += "; logits stay apart for the loss"
    if found.summed:
        text += f"; gradients summed over tp: {', '.join(found.summed[:8])}"
    if found.attributes:
        text += "; divided: " + ", ".join(f"{name}.{a}" for name, names in found.attributes.items() for a in names)
    if found.left:
        text += "; left whole: " + ", ".join(f"{name} ({why})" for name, why in list(found.left.items())[:8])
    return text
