"""Transform that shards a model over processes with torch's fully_shard, for any module and any number of models."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Placed

from hasten.comm.agreement import agree
from hasten.config.sections.loop import PrecisionType
from hasten.config.sections.parallel import FullyShardedDataParallelPlugin
from hasten.errors import PrepareError, StepError
from hasten.modules import forwarding
from hasten.modules.quantized import PackedLayers, frozen_integers
from hasten.optim.gradients import drop_gradients
from hasten.precision.base import Precision
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh import WorldMesh
from hasten.runtime.mesh_plan import LOSS, SHARD, Axis
from hasten.strategies.base import PrepareRequest, Stage
from hasten.strategies.experts.strategy import expert_groups, sharded_dim
from hasten.strategies.fsdp.resharding import (
    ReshardWithoutGradients,
    mark_forward_method,
)
from hasten.strategies.fsdp.shard_groups import (
    CONTAINERS,
    blocks_to_shard,
    ignored_parameters,
    keep_ties_together,
    owned_parameters,
)
from hasten.strategies.gradient_hooks import (
    refuse_gradient_hooks,
    refuse_later_hooks,
)
from hasten.strategies.weight_sources import (
    WeightSource,
    allocate_meta,
    copy_from_rank_0,
    copy_tensors,
    fill_by_function,
    keep_rest_on_device,
    named_tensors,
    scatter_from_rank_0,
    source_of,
)
from hasten.strategies.whole import average_gradients, scalar_parameters, whole_on_main

log = logging.getLogger(__name__)

_DTYPES: Final = (
    ("fp32", torch.float32),
    ("bf16", torch.bfloat16),
    ("fp16", torch.float16),
)


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Sharding of one model, decided before the model is changed."""

    name: str
    blocks: list[nn.Module]
    unsharded_parameters: set[nn.Parameter]
    policy: MixedPrecisionPolicy
    notes: list[str]
    experts: list[nn.Module]
    """Modules of experts, whose shard groups span only the ranks with the same experts."""
    merged_blocks: list[nn.Module]
    """Blocks without a shard group in this run, which would have one with more processes."""


class ShardModel:
    """Transform that shards parameters, gradients and optimizer state, and replicates over the replicate axis."""

    stage = Stage.DISTRIBUTE

    def __init__(
        self,
        fsdp_config: FullyShardedDataParallelPlugin,
        mesh: WorldMesh,
        keep_outputs: bool = False,
    ) -> None:
        self._config = fsdp_config
        self._world_mesh = mesh
        self._keep_outputs = keep_outputs
        self._mesh: DeviceMesh | None = None
        self._replicated = False
        self._is_main = True
        # sharded parameters by id, while they exist
        self._sharded = WeakValueDictionary[int, nn.Parameter]()

    def apply(
        self,
        model: nn.Module,
        request: PrepareRequest,
        ctx: ProcessContext,
        precision: Precision,
    ) -> nn.Module:
        if isinstance(model, FSDPModule):
            return model
        if not request.train:
            if request.place and not hasattr(model, "hf_device_map"):
                return model.to(ctx.device)
            return model
        mesh = self._mesh_for(ctx)
        with agree(ctx.world, f"sharding {type(model).__name__}"):
            packed = PackedLayers(model, ctx.device)
            layout = self._decide_layout(model, precision, ctx)
        source = source_of(model, self._config, ctx)
        self._remember_parameters(model)
        _make_dense(model, layout.unsharded_parameters)
        if source is not WeightSource.RANK_0 and self._config.sync_module_states:
            copy_from_rank_0(model, ctx)
            copy_tensors(packed.tensors(), ctx)
        if source is WeightSource.RANK_0 and ctx.is_main:
            unsharded_tensors = {}
            for tensor_name, tensor in named_tensors(model):
                unsharded_tensors[tensor_name] = tensor.data
        else:
            unsharded_tensors = {}
        with frozen_integers() if packed.num_bytes else nullcontext():
            self._shard_blocks(model, layout, mesh, ctx)
        packed.attach_states()
        allocate_meta(
            model, torch.device("cpu") if self._config.cpu_offload else ctx.device
        )
        keep_rest_on_device(model, ctx)
        if source is WeightSource.RANK_0:
            scatter_from_rank_0(model, unsharded_tensors, ctx)
        elif source is WeightSource.NO_RANK:
            fill_by_function(model, self._config)
        self._remember_parameters(model)
        refuse_later_hooks(model)
        average_gradients(list(scalar_parameters(model).values()), ctx.groups(*LOSS))
        if ctx.is_main:
            for note in (
                *layout.notes,
                *packed.notes,
                _describe_sharding(model, mesh, layout, self._config, source),
            ):
                log.info(note)
        return model

    def _remember_parameters(self, model: nn.Module) -> None:
        """Record the parameters before and after sharding, to recognise them if another model shares them."""
        self._sharded.update(
            (id(parameter), parameter) for parameter in model.parameters()
        )

    def _decide_layout(
        self, model: nn.Module, precision: Precision, ctx: ProcessContext
    ) -> ShardLayout:
        """Return the layout of a model. Raises: ConfigError or PrepareError for a model that cannot be sharded."""
        _refuse_unshardable(model, self._sharded)
        ignored = ignored_parameters(model, self._config)
        zero_dims = scalar_parameters(model)
        whole_parameters = ignored | set(zero_dims.values())
        chosen_blocks = blocks_to_shard(model, self._config)
        inside_blocks: list[nn.Module] = []
        if self._better_in_one_group(model, whole_parameters, ctx):
            chosen_blocks, inside_blocks = [], chosen_blocks
        experts = expert_groups(model)
        chosen_blocks = [
            *experts,
            *(
                block
                for block in chosen_blocks
                if not any(block is expert_module for expert_module in experts)
            ),
        ]
        blocks, tied = keep_ties_together(model, chosen_blocks, whole_parameters)
        _refuse_mixed_masters(model, blocks, whole_parameters)
        refuse_gradient_hooks(model, whole_parameters)
        notes = []
        if len(blocks) < len(chosen_blocks):
            notes.append(
                f"{len(chosen_blocks) - len(blocks)} of {len(chosen_blocks)} blocks are not sharded separately, because they share {tied[0]!r} with "
                "another block: they are sharded with the enclosing group"
            )
        if zero_dims:
            notes.append(
                f"{', '.join(zero_dims)} cannot be sharded (no dimension) and are replicated on every rank"
            )
        policy = mixed_precision(self._config, precision.spec, self._keep_outputs)
        return ShardLayout(
            type(model).__name__,
            blocks,
            whole_parameters,
            policy,
            notes,
            experts,
            inside_blocks,
        )

    def _better_in_one_group(
        self, model: nn.Module, whole_parameters: set[nn.Parameter], ctx: ProcessContext
    ) -> bool:
        """Return whether one group is best: a single process gains nothing from several, unless parameters are offloaded."""
        config = self._config
        automatic = (
            config.auto_wrap_policy == "auto"
            and not config.transformer_cls_names_to_wrap
        )
        if not automatic or config.cpu_offload or ctx.mesh.size(*LOSS) > 1:
            return False
        trained_parameters = []
        for p in model.parameters():
            if p.requires_grad and p not in whole_parameters:
                trained_parameters.append(p)
        return len({parameter.dtype for parameter in trained_parameters}) <= 1

    def _shard_blocks(
        self,
        model: nn.Module,
        shard_layout: ShardLayout,
        device_mesh: DeviceMesh,
        ctx: ProcessContext,
    ) -> None:
        block_policy = replace(
            shard_layout.policy, output_dtype=None
        )  # between blocks, activations stay in the compute dtype
        options: dict[str, Any] = {  # Any: keywords of fully_shard
            "mesh": device_mesh,
            "offload_policy": self._offload_policy(ctx),
            "ignored_params": shard_layout.unsharded_parameters,
            # a single rank holds everything: freeing and gathering would only copy
            "reshard_after_forward": ctx.mesh.size(*SHARD) > 1
            and self._config.reshard_after_forward,
        }
        if shard_layout.experts:
            expert_options = self._for_experts(ctx, options)
        else:
            expert_options = {}
        for block in shard_layout.blocks:
            fully_shard(
                block,
                mp_policy=block_policy,
                **(expert_options if block in shard_layout.experts else options),
            )
        for block in shard_layout.merged_blocks:
            block.register_forward_pre_hook(_called_inside)
        fully_shard(model, mp_policy=shard_layout.policy, **options)
        assert isinstance(model, FSDPModule), "fully_shard changed its class"
        resharding = ReshardWithoutGradients(model)
        resharding.wrap_generate(model, options["reshard_after_forward"])
        if options["reshard_after_forward"]:
            _note_late_heads(model)
        self._set_prefetching(shard_layout.blocks)

    # Any: keywords of fully_shard
    def _for_experts(
        self, ctx: ProcessContext, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the options for experts, which have copies or shards on fewer ranks."""
        copies, shards, _ = ctx.mesh.expert_sizes
        axis_names = [Axis.DP_SHARD]
        if copies > 1:
            axis_names.insert(0, Axis.DP_REPLICATE)
        return {
            **options,
            "mesh": self._world_mesh.expert_mesh(ctx)[tuple(map(str, axis_names))],
            "shard_placement_fn": lambda part: Placed(sharded_dim(part, shards) or 0),
            "reshard_after_forward": shards > 1 and self._config.reshard_after_forward,
        }

    def undo(self, model: nn.Module) -> nn.Module:
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context manager without all-reduce over replicas; gradients are still reduce-scattered over shards."""
        if not self._replicated or not isinstance(model, FSDPModule):
            return nullcontext()
        return _without_all_reduce(model)

    # Any: tensors and extra state
    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return whole tensors in host memory on the main process; an empty dict elsewhere. Ranks: every rank."""
        return whole_on_main(model, self._is_main)

    def mark_forward_method(self, model: nn.Module, name: str) -> None:
        mark_forward_method(model, name)

    def join(self, models: list[nn.Module]) -> AbstractContextManager[None]:
        raise StepError(
            "join_uneven_inputs() is not supported under fsdp: every rank must take part in every all-gather of parameters. Use "
            "even_batches=True (the default), which gives every rank the same number of batches."
        )

    def drop_gradients(self, model: nn.Module) -> None:
        drop_gradients(model)
        _drop_accumulated_gradients(model)

    def _mesh_for(self, ctx: ProcessContext) -> DeviceMesh:
        if self._mesh is None:
            self._is_main = ctx.is_main
            self._replicated = ctx.mesh.size(Axis.DP_REPLICATE) > 1
            axis_names = [Axis.DP_SHARD]
            if self._replicated:
                axis_names.insert(0, Axis.DP_REPLICATE)
            self._mesh = self._world_mesh.mesh_along(ctx, *axis_names)
        return self._mesh

    def _offload_policy(self, ctx: ProcessContext) -> OffloadPolicy:
        if not self._config.cpu_offload:
            return OffloadPolicy()
        pin = self._config.cpu_offload_pin_memory and ctx.device.type != "cpu"
        return CPUOffloadPolicy(pin_memory=pin)

    def _set_prefetching(self, blocks: Sequence[nn.Module]) -> None:
        forward_depth = self._config.forward_prefetch_depth
        backward_depth = self._config.backward_prefetch_depth
        sharded_blocks: list[FSDPModule] = []
        for block in blocks:
            if isinstance(block, FSDPModule):
                sharded_blocks.append(block)
        for index, sharded_block in enumerate(sharded_blocks):
            if forward_depth:
                sharded_block.set_modules_to_forward_prefetch(
                    sharded_blocks[index + 1 : index + 1 + forward_depth]
                )
            if backward_depth:
                sharded_block.set_modules_to_backward_prefetch(
                    sharded_blocks[max(0, index - backward_depth) : index][::-1]
                )


def _called_inside(block: nn.Module, inputs: object) -> None:
    """Raise if the block is called outside its model: only the whole model gathers its parameters."""
    first: Tensor | None = next(block.parameters(), None)
    # gathered parameters of split layers are DTensors too, but only along the tensor-parallel axis
    if isinstance(first, DTensor) and first.device_mesh.mesh_dim_names != (
        str(Axis.TP),
    ):
        raise StepError(
            f"a {type(block).__name__} was called outside its model's forward. With a world size of one all parameters are in one shard "
            "group, which is only gathered by a call of the model. Call the model, or shard the blocks as separate groups: "
            f"fsdp.transformer_cls_names_to_wrap={type(block).__name__!r}."
        )


@contextmanager
def _without_all_reduce(model: FSDPModule) -> Iterator[None]:
    model.set_requires_all_reduce(False)
    try:
        yield
    finally:
        model.set_requires_all_reduce(True)


def mixed_precision(
    fsdp_config: FullyShardedDataParallelPlugin, spec: PrecisionType, keep_outputs: bool
) -> MixedPrecisionPolicy:
    """Return the dtypes of gathered parameters, of reductions and of outputs."""
    if isinstance(fsdp_config.mixed_precision_policy, MixedPrecisionPolicy):
        return fsdp_config.mixed_precision_policy
    given_dtypes = fsdp_config.dtypes
    dtypes_by_name = dict(_DTYPES)
    half = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}.get(
        spec
    )
    param_dtype = half
    reduce_dtype = torch.float32 if half else None
    output_dtype = None if keep_outputs else reduce_dtype
    if given_dtypes.param_dtype:
        param_dtype = dtypes_by_name[given_dtypes.param_dtype]
    if given_dtypes.reduce_dtype:
        reduce_dtype = dtypes_by_name[given_dtypes.reduce_dtype]
    if given_dtypes.output_dtype:
        output_dtype = dtypes_by_name[given_dtypes.output_dtype]
    return MixedPrecisionPolicy(
        param_dtype, reduce_dtype, output_dtype, given_dtypes.cast_forward_inputs
    )


def _note_late_heads(model: nn.Module) -> None:
    """Give heads whose logits are computed late the module that gathers their weight, which is freed when the model returns."""
    owners = []
    for module_name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            owners.append((module_name, module))
    for module_name, module in model.named_modules():
        if isinstance(
            head := forwarding.find(module, forwarding.LateHead.tag),
            forwarding.LateHead,
        ):
            enclosing_modules = []
            for prefix, owner in owners:
                if not prefix or f"{module_name}.".startswith(f"{prefix}."):
                    enclosing_modules.append(owner)
            head.gathered_by = ref(enclosing_modules[-1])


def _make_dense(model: nn.Module, whole_parameters: set[nn.Parameter]) -> None:
    """Make parameters contiguous: torch shards no other memory format (channels_last, for example)."""
    for parameter in model.parameters():
        if parameter not in whole_parameters and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _refuse_unshardable(model: nn.Module, sharded: Mapping[int, nn.Parameter]) -> None:
    model_name = type(model).__name__
    if isinstance(model, CONTAINERS):
        raise PrepareError(
            f"a {model_name} has no forward, so its parameters would never be gathered. Put its modules into a module with a forward, or "
            "prepare each of them."
        )
    sharded_names = []
    for module_name, parameter in model.named_parameters():
        if sharded.get(id(parameter)) is parameter:
            sharded_names.append(module_name)
    sharded_modules = []
    for module_name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            sharded_modules.append(module_name)
    if sharded_names or sharded_modules:
        raise PrepareError(
            f"{(sharded_names or sharded_modules)[0]!r} of {model_name} is also part of a model that is already sharded, but a parameter can only be in one "
            "shard group. Prepare one module that contains both models, and call them through methods marked with mark_forward_method()."
        )


def _refuse_mixed_masters(
    model: nn.Module, blocks: Sequence[nn.Module], whole_parameters: set[nn.Parameter]
) -> None:
    """Raise if trained parameters of a group have different dtypes: torch reduces their gradients together."""
    names_by_dtype: dict[int, dict[torch.dtype, str]] = {}
    for owner, name, parameter in owned_parameters(model, blocks):
        if parameter.requires_grad and parameter not in whole_parameters:
            names_by_dtype.setdefault(id(owner), {}).setdefault(parameter.dtype, name)
    for group in names_by_dtype.values():
        if len(group) > 1:
            (first_dtype, first), (second_dtype, second) = list(group.items())[:2]
            raise PrepareError(
                f"{first!r} is {first_dtype} and {second!r} is {second_dtype}; both are trainable and in one shard group, whose gradients are reduced "
                "in one dtype. Convert the trainable parameters to one dtype (model.float()), or use "
                "mixed_precision='bf16' with master_weights='fp32'."
            )


def _describe_sharding(
    model: nn.Module,
    device_mesh: DeviceMesh,
    shard_layout: ShardLayout,
    fsdp_config: FullyShardedDataParallelPlugin,
    weight_source: WeightSource,
) -> str:
    trained_dtypes = set()
    for parameter in model.parameters():
        if parameter.requires_grad:
            trained_dtypes.add(str(parameter.dtype).removeprefix("torch."))
    compute_dtype = shard_layout.policy.param_dtype or "the same"
    if fsdp_config.cpu_offload:
        place_text = "in host memory"
    else:
        place_text = "on the device"
    axis_sizes = dict(
        zip(device_mesh.mesh_dim_names or (), device_mesh.shape, strict=True)
    )
    text = (
        f"{shard_layout.name} is sharded over {axis_sizes} in {len(shard_layout.blocks) + 1} groups: master weights "
        f"{' and '.join(sorted(trained_dtypes)) or 'none (frozen)'} {place_text}, computing in "
        f"{str(compute_dtype).removeprefix('torch.')}, reducing in "
        f"{str(shard_layout.policy.reduce_dtype or compute_dtype).removeprefix('torch.')}"
    )
    if fsdp_config.cpu_ram_efficient_loading and weight_source is WeightSource.EVERYONE:
        text += "; cpu_ram_efficient_loading saved nothing, because every rank built the model with weights"
    return text


def _drop_accumulated_gradients(model: nn.Module) -> None:
    """Drop the gradients of an interrupted accumulation window that the next reduction would add."""
    for group in _nonempty_groups(model):
        if hasattr(group, "_partial_reduce_output"):
            group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            if hasattr(parameter, "unsharded_accumulated_grad"):
                parameter.unsharded_accumulated_grad = None
            if (gathered := getattr(parameter, "_unsharded_param", None)) is not None:
                gathered.grad = None


def _nonempty_groups(model: nn.Module) -> Iterator[Any]:
    """Return FSDP's private records of its parameters, one per shard group."""
    return (group for group in _all_groups(model) if group.fsdp_params)


def _all_groups(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            # torch<2.12 has one group per module, later versions a list of groups.
            groups = getattr(state, "_fsdp_param_groups", None) or [
                getattr(state, "_fsdp_param_group", None)
            ]
            yield from (group for group in groups if group is not None)
