"""Pipeline parallelism: the layers of a model are partitioned over ranks, and batches pass through as micro-batches."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hasten import trees
from hasten.comm.agreement import agree
from hasten.comm.base import Comm
from hasten.comm.process_group import ProcessGroupComm
from hasten.config.sections.parallel import (
    FullyShardedDataParallelPlugin,
    PipelineParallelConfig,
)
from hasten.errors import PrepareError, StepError
from hasten.extensions.pipeline.cut import (
    StageCut,
    decide_cut,
    find_shared_parameters,
    part_of,
)
from hasten.extensions.pipeline.learn import Learner, Signature, batch_signature
from hasten.extensions.pipeline.passes import BlockChain, StageForward
from hasten.extensions.pipeline.schedule import (
    LearntShapes,
    LossOf,
    Stepper,
    WeightOf,
    checked_loss,
    refuse_unweighted,
    relative_weights,
)
from hasten.extensions.pipeline.stage_plan import (
    check_microbatches,
    default_microbatches,
    place_stages,
)
from hasten.modules import forwarding
from hasten.modules.names import TAG, is_dtensor, named_parameters, whole_of
from hasten.optim import clip
from hasten.optim.loss_weights import checked_weight
from hasten.optim.window import Number
from hasten.precision.base import Precision
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh import group_of
from hasten.runtime.mesh_plan import AXES, LOSS, Axis
from hasten.strategies.base import DistributionTransform, PrepareRequest, Stage, Weigh
from hasten.strategies.micro_batches import broadcast_output, check_rows
from hasten.strategies.weight_sources import WeightSource, copy_from_rank_0, source_of
from hasten.trees import Tree


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter], comm: Comm) -> None:
    """Replace each gradient by its mean over the ranks of `comm`, with one message per dtype.

    A rank without a gradient of a parameter contributes zeros. Ranks: every rank of the group.
    """
    if comm.size == 1:
        return
    parameters_by_kind: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            parameters_by_kind.setdefault(
                (parameter.device, parameter.dtype), []
            ).append(parameter)
    for alike_parameters in parameters_by_kind.values():
        gradient_parts = []
        gradient_flags = []
        for parameter in alike_parameters:
            if parameter.grad is None:
                gradient_parts.append(torch.zeros_like(_local_part(parameter)))
            else:
                gradient_parts.append(_local_part(parameter.grad))
            gradient_flags.append(float(parameter.grad is not None))
        has_gradient = gradient_parts[0].new_tensor(gradient_flags)
        flat_parts = [gradient_part.reshape(-1) for gradient_part in gradient_parts]
        averaged_gradients = comm.all_reduce(
            torch.cat([has_gradient, *flat_parts]), "mean"
        )
        gradient_shares = averaged_gradients[: len(alike_parameters)].tolist()
        offset = len(alike_parameters)
        for parameter, gradient_part, share_of_ranks in zip(
            alike_parameters, gradient_parts, gradient_shares, strict=True
        ):
            if share_of_ranks:
                gradient_part.copy_(
                    averaged_gradients[offset : offset + gradient_part.numel()].view_as(
                        gradient_part
                    )
                )
                if parameter.grad is None:
                    _set_gradient(parameter, gradient_part)
            offset += gradient_part.numel()


def _local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor.detach()


def _set_gradient(parameter: nn.Parameter, gradient_part: Tensor) -> None:
    if is_dtensor(parameter):
        parameter.grad = type(parameter.data).from_local(  # type: ignore[attr-defined]  # a method of DTensor
            gradient_part,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    else:
        parameter.grad = gradient_part


@dataclass(slots=True)
class SharedWeights:
    """Parameters of one model that have copies on several ranks, such as tied embeddings.

    Each copy gets the gradient of its stage; the sum over copies is the gradient of the weight.
    """

    members: list[tuple[nn.Parameter, dist.ProcessGroup]] = field(default_factory=list)
    _aside: list[Tensor | None] = field(default_factory=list)

    def set_aside(self) -> None:
        """Set the gradients summed so far aside, so that new ones accumulate separately."""
        self._aside = [parameter.grad for parameter, _ in self.members]
        for parameter, _ in self.members:
            parameter.grad = None

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sum the gradients since `set_aside` over the ranks with a copy. Ranks: every rank with a copy."""
        for (parameter, group), earlier_gradient in zip(
            self.members, self._aside, strict=True
        ):
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                _set_gradient(parameter, torch.zeros_like(_local_part(parameter)))
            assert parameter.grad is not None, "given just now"
            gradient_part = _local_part(parameter.grad).contiguous()
            dist.all_reduce(gradient_part, group=group)
            _local_part(parameter.grad).copy_(gradient_part)
            if earlier_gradient is not None:
                _local_part(parameter.grad).add_(_local_part(earlier_gradient))
        self._aside = []


log = logging.getLogger(__name__)


class Pipeline:
    """Distribution transform that splits models into stages, runs batches through them, and synchronises the stages' gradients.

    `within` spreads the part of the model on a stage over that stage's ranks.
    """

    stage = Stage.DISTRIBUTE

    def __init__(
        self,
        config: PipelineParallelConfig,
        fsdp: FullyShardedDataParallelPlugin,
        ctx: ProcessContext,
        within: DistributionTransform,
    ) -> None:
        self._config = config
        self._within = within
        self._fsdp = fsdp
        comm = ctx.groups(Axis.PP)
        assert isinstance(comm, ProcessGroupComm), "a pipeline has several ranks"
        self._comm = comm
        self._ctx = ctx
        self._peers = ctx.groups(*LOSS)
        within_ranks = ctx.groups(*(axis for axis in AXES if axis is not Axis.PP))
        self._stage_ctx = replace(ctx, world=within_ranks)
        self._place = place_stages(config.schedule, comm.size, config.stages_per_rank)
        self._count = config.num_microbatches or default_microbatches(
            config.schedule, comm.size
        )
        check_microbatches(config.schedule, comm.size, self._count)
        self._shared = WeakKeyDictionary[nn.Module, SharedWeights]()
        # Any: torch's process groups
        self._ties = WeakKeyDictionary[nn.Module, dict[str, Any]]()
        self._learner = Learner(comm, self._place, ctx.device)
        self._steppers = WeakKeyDictionary[nn.Module, dict[Signature, Stepper]]()
        self._copies = WeakValueDictionary[int, nn.Parameter]()
        self._is_paused = False

    def __deepcopy__(self, memo: object) -> Pipeline:
        return self  # a copied model runs through the same ranks

    # -- preparing ------------------------------------------------------------------------------------------------
    def cut_model(self, model: nn.Module) -> nn.Module:
        """Keep only this rank's stages of the model. Ranks: every rank."""
        if forwarding.find(model, TAG) is not None:
            return model
        ctx = self._ctx
        rank = self._comm.rank
        with agree(ctx.world, f"splitting {type(model).__name__} into pipeline stages"):
            stage_cut = decide_cut(model, self._config, self._place)
            _prepare_settings(model)
        weight_source = source_of(model, self._fsdp, ctx)
        if weight_source is WeightSource.RANK_0:
            _allocate_meta_tensors(model, ctx.device)
        if weight_source is not WeightSource.NO_RANK:
            copy_from_rank_0(model, ctx)
        ranks_by_tie = find_shared_parameters(model, stage_cut)
        held_ties = {}
        for tied_name, pipeline_ranks in ranks_by_tie.items():
            if rank in pipeline_ranks:
                world_ranks = map(self._comm.ranks.__getitem__, pipeline_ranks)
                held_ties[tied_name] = tuple(world_ranks)
        tie_groups = {
            ranks: group_of(ranks) for ranks in dict.fromkeys(held_ties.values())
        }
        if ctx.is_main:
            log.info(_describe_stages(model, stage_cut, ranks_by_tie))
        block_chain = BlockChain(
            model, stage_cut, part_of(model, stage_cut, rank), rank, ctx.device
        )
        forwarding.replace(model, StageForward(block_chain, self._call_model))
        self._ties[model] = {
            tied_name: tie_groups[ranks] for tied_name, ranks in held_ties.items()
        }
        return model

    def apply(
        self,
        model: nn.Module,
        request: PrepareRequest,
        ctx: ProcessContext,
        precision: Precision,
    ) -> nn.Module:
        wrapped_model = self._within.apply(model, request, self._stage_ctx, precision)
        block_chain = self._make_line(wrapped_model)
        if wrapped_model not in self._shared:
            block_chain.attach_hooks(wrapped_model)
            ties = self._ties.get(wrapped_model, {})
            stage_part = block_chain.part
            shared_weights = SharedWeights()
            for parameter_name, parameter in named_parameters(wrapped_model):
                whole_name = stage_part.whole_name(parameter_name)
                if whole_name in ties:
                    shared_weights.members.append((parameter, ties[whole_name]))
                if whole_name in stage_part.copies:
                    self._copies[id(parameter)] = parameter
            self._shared[wrapped_model] = shared_weights
        return wrapped_model

    def undo(self, model: nn.Module) -> nn.Module:
        return self._within.undo(model)

    def clip_norm(
        self, parameters: Sequence[Tensor], max_norm: float, norm_type: float
    ) -> Tensor:
        """Clip the gradients to a norm over all stages; a weight on two stages counts once."""
        return clip.clip_norm(
            parameters,
            max_norm,
            norm_type,
            across=self._comm,
            counts=lambda parameter: id(parameter) not in self._copies,
        )

    def _make_line(self, model: nn.Module) -> BlockChain:
        forward = forwarding.find(model, TAG)
        if not isinstance(forward, StageForward):
            raise PrepareError(
                f"a {type(model).__name__} was passed that this Accelerator has not split into pipeline stages; pass the model that "
                "prepare() returned."
            )
        return forward.line

    # -- training -------------------------------------------------------------------------------------------------
    def forward_backward(
        self,
        model: nn.Module,
        batch: Tree,
        loss_of: LossOf,
        weigh: Weigh,
        weight: WeightOf | None = None,
    ) -> Tensor:
        """Run forward and backward of a batch in micro-batches; return its loss on every stage. Ranks: every rank."""
        block_chain = self._make_line(model)
        num_micro_batches = self._count
        device = self._ctx.device
        micro_rows = check_rows(trees.batch_size(batch), num_micro_batches)
        total_rows = micro_rows * num_micro_batches
        micro_batches = []
        for batch_index in range(num_micro_batches):
            micro_batches.append(
                trees.slice_rows(
                    batch,
                    slice(batch_index * micro_rows, (batch_index + 1) * micro_rows),
                    total_rows,
                )
            )
        batch_kind = (
            "train",
            model.training,
            weight is None,
            *batch_signature(micro_batches[0]),
        )
        stepper = self._steppers.setdefault(model, {}).get(batch_kind)
        if stepper is None:
            if weight is None and num_micro_batches > 1:
                refuse_unweighted(batch)
            stepper = self._steppers[model][batch_kind] = self._new_stepper(
                model, block_chain, batch_kind, micro_batches[0], loss_of
            )
        loss_shares: Sequence[Tensor | float] = [
            1 / num_micro_batches
        ] * num_micro_batches
        total_weight: Number | None = None
        if weight is not None:
            batch_weights = [
                checked_weight(weight(micro_batch)) for micro_batch in micro_batches
            ]
            total_weight = sum(batch_weights)
            loss_shares = relative_weights(batch_weights, device)
        loss_factor = weigh(torch.ones((), device=device), total_weight)
        shared_weights = self._shared[model]
        shared_weights.set_aside()
        loss = stepper.step(micro_batches, loss_of, loss_factor, loss_shares)
        shared_weights.sum_gradients()
        if not self._is_paused and not self._is_sharded:
            average_gradients(model.parameters(), self._peers)
        own_loss = torch.zeros((), device=device) if loss is None else loss
        return self._comm.broadcast(
            own_loss, self._place.rank_of(self._place.stages - 1)
        )

    def _new_stepper(
        self,
        model: nn.Module,
        block_chain: BlockChain,
        kind: Signature,
        micro: Tree,
        loss_of: LossOf,
    ) -> Stepper:
        """Return the schedule for a kind of micro-batch, whose shapes are inferred. Ranks: the whole pipeline."""

        def run_first() -> Tensor:
            if self._count > 1:
                _refuse_batch_norm(model, self._count)
            return checked_loss(loss_of(model, micro))

        learnt_shapes = self._learner.learn_shapes(model, block_chain, kind, run_first)
        return Stepper(
            model,
            block_chain,
            learnt_shapes,
            self._count,
            self._config.schedule,
            self._comm,
        )

    @property
    def _is_sharded(self) -> bool:
        return self._ctx.mesh.size(Axis.DP_SHARD) > 1

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        was_paused = self._is_paused
        self._is_paused = True
        try:
            with self._within.no_sync(model):
                yield
        finally:
            self._is_paused = was_paused

    # -- forward only ---------------------------------------------------------------------------------------------
    def _call_model(
        self, forward: StageForward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the output of the whole model; None on ranks that do not receive it. Ranks: every rank of the pipeline."""
        model = forward.module
        block_chain = forward.line
        if torch.is_grad_enabled():
            raise StepError(
                f"{type(model).__name__} was called with gradients enabled, but its layers are on {self._comm.size} pipeline "
                "ranks, so backward would stop at the stage's first block. Train with accelerator.forward_backward("
                "model, batch, loss_of), and call the model under torch.no_grad()."
            )
        if kwargs.get("use_cache") or kwargs.get("past_key_values") is not None:
            raise StepError(
                f"{type(model).__name__} was called with a key-value cache, as generate() does with use_cache=True, but a pipeline "
                "stage does not have the keys of other stages. Call generate(..., use_cache=False) on every rank, or save the model "
                "(accelerator.save_model) and generate in a process with the whole model."
            )
        num_rows = trees.batch_size((args, kwargs))
        micro_rows = max(1, -(-(num_rows or 1) // self._count))
        row_slices = [
            slice(start_row, start_row + micro_rows)
            for start_row in range(0, num_rows or 1, micro_rows)
        ]
        if num_rows:
            micro_batches = [
                trees.slice_rows((args, kwargs), row_slice, num_rows)
                for row_slice in row_slices
            ]
        else:
            micro_batches = [(args, kwargs)]
        learnt_shapes: list[LearntShapes] = []
        for micro_batch in micro_batches:
            batch_kind = ("forward", model.training, *batch_signature(micro_batch))
            learnt_shapes.append(
                self._learner.learn_shapes(
                    model,
                    block_chain,
                    batch_kind,
                    partial(forward.through, *micro_batch),
                )
            )
        micro_outputs = self._run_through(
            block_chain, forward, micro_batches, learnt_shapes
        )
        last_rank = self._place.rank_of(self._place.stages - 1)
        model_output = None
        if self._comm.rank == last_rank:
            row_counts = []
            for row_slice in row_slices:
                row_counts.append(min(row_slice.stop, num_rows or 1) - row_slice.start)
            model_output = _join_outputs(
                micro_outputs,
                row_counts,
            )
        if forward.gathers_output:
            return broadcast_output(model_output, self._comm, last_rank)
        return model_output

    def _run_through(
        self,
        block_chain: BlockChain,
        forward: StageForward,
        micro_batches: list[Any],
        learnt_shapes: list[LearntShapes],
    ) -> list[Any]:  # Any: arguments and outputs of the model
        """Return the outputs of all micro-batches, on the rank of the last stage."""
        rank_of = self._place.rank_of
        own_rank = self._comm.rank
        ranks = self._comm.ranks
        group = self._comm.group
        local_outputs: dict[tuple[int, int], Tensor] = {}
        pending_sends: list[tuple[Any, Tensor]] = []  # Any: torch's work handles
        final_outputs: list[Any] = []
        for stage in block_chain.stages:
            for batch_index, (args, kwargs) in enumerate(micro_batches):
                received_hidden = None
                if stage and rank_of(stage - 1) == own_rank:
                    received_hidden = local_outputs.pop((stage - 1, batch_index))
                elif stage:
                    received_hidden = torch.empty_like(
                        learnt_shapes[batch_index].inputs[stage],
                        device=block_chain.device,
                        requires_grad=False,
                    )
                    dist.recv(received_hidden, ranks[rank_of(stage - 1)], group=group)
                running_pass = block_chain.begin_pass(
                    stage, received_hidden, learnt_shapes[batch_index].seen
                )
                stage_output = block_chain.run_stage(
                    running_pass, partial(forward.through, args, kwargs)
                )
                if running_pass.final:
                    final_outputs.append(stage_output)
                elif rank_of(stage + 1) == own_rank:
                    local_outputs[stage, batch_index] = stage_output
                else:
                    sent_tensor = stage_output.detach().contiguous()
                    pending_sends.append(
                        (
                            dist.isend(
                                sent_tensor, ranks[rank_of(stage + 1)], group=group
                            ),
                            sent_tensor,
                        )
                    )
        for send_handle, _ in pending_sends:
            send_handle.wait()
        return final_outputs

    # -- state ----------------------------------------------------------------------------------------------------
    # Any: tensors and extra state
    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the unsharded state of all stages on the CPU of the main process; {} elsewhere. Ranks: every rank."""
        stage_part = self._make_line(model).part
        own_state: dict[str, Any] = {}
        for state_key, state_tensor in model.state_dict(keep_vars=True).items():
            if is_dtensor(state_tensor):
                state_tensor = whole_of(state_tensor)
            if isinstance(state_tensor, Tensor):
                state_tensor = state_tensor.detach()
            own_state[state_key] = state_tensor
        whole_state: dict[str, Any] = {}
        for pipeline_rank in range(self._comm.size):
            sent_keys = own_state.keys() & stage_part.own_keys
            sent_state = {state_key: own_state[state_key] for state_key in sent_keys}
            stage_state = broadcast_output(
                sent_state,
                self._comm,
                pipeline_rank,
            )
            if self._ctx.is_main:
                for state_key, state_tensor in stage_state.items():
                    if isinstance(state_tensor, Tensor):
                        state_tensor = state_tensor.cpu()
                    whole_state[state_key] = state_tensor
        for first_name, *tied_names in stage_part.ties:
            if first_name in whole_state:
                whole_state |= dict.fromkeys(tied_names, whole_state[first_name])
        if self._ctx.is_main:
            return {
                state_key: whole_state[state_key] for state_key in stage_part.state_keys
            }
        return {}

    def mark_forward_method(self, model: nn.Module, name: str) -> None:
        raise PrepareError(
            f"mark_forward_method({name!r}) is not supported under pipeline parallelism: only the model's forward runs through the "
            "stages. Call the model."
        )

    def join(self, models: list[nn.Module]) -> AbstractContextManager[None]:
        raise StepError(
            "join_uneven_inputs() is not supported under pipeline parallelism: every stage must take part in every batch. Use "
            "even_batches=True (the default), which gives every rank the same number of batches."
        )

    def drop_gradients(self, model: nn.Module) -> None:
        self._within.drop_gradients(model)


class CutStages:
    """Transform that keeps only this rank's stages of a model."""

    stage = Stage.SPLIT

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def apply(
        self,
        model: nn.Module,
        request: PrepareRequest,
        ctx: ProcessContext,
        precision: Precision,
    ) -> nn.Module:
        return self._pipeline.cut_model(model)

    def undo(self, model: nn.Module) -> nn.Module:
        return model


def _prepare_settings(model: nn.Module) -> None:
    """Raise for settings of the model that stages cannot run with, and turn its cache off."""
    if getattr(model, "is_gradient_checkpointing", False):
        raise PrepareError(
            f"{type(model).__name__} recomputes activations around the calls of its blocks, where pipeline stages begin. Turn its "
            "gradient checkpointing off, and set fsdp.activation_checkpointing=True or recompute."
        )
    for settings_name in ("config", "generation_config"):
        # Any: transformers' settings of the model
        model_settings: Any = getattr(model, settings_name, None)
        if getattr(model_settings, "use_cache", False):
            model_settings.use_cache = False
            log.info(
                "%s: %s.use_cache is set to False: a stage does not have the keys of other stages",
                type(model).__name__,
                settings_name,
            )


def _refuse_batch_norm(model: nn.Module, num_micro_batches: int) -> None:
    """Raise for a layer that normalises over the batch, of which it would see one micro-batch at a time."""
    norm_classes = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    for norm_name, module in model.named_modules():
        if not isinstance(module, norm_classes) or not module.training:
            continue
        raise StepError(
            f"{norm_name!r} normalises by the mean and variance of its batch, but under pipeline parallelism it sees one of {num_micro_batches} "
            "micro-batches at a time, so the results would differ from those of the whole batch. Use GroupNorm or LayerNorm, freeze its "
            "statistics with .eval(), or set pp_handler.num_microbatches=1 with schedule='gpipe'."
        )


def _allocate_meta_tensors(model: nn.Module, device: torch.device) -> None:
    """Allocate meta tensors on the ranks that hold no values; the values come from rank 0 afterwards."""

    def allocate_tensor(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    model._apply(allocate_tensor)  # type: ignore[no-untyped-call]  # torch leaves it untyped


# Any: the model's outputs
def _join_outputs(outputs: list[Any], row_numbers: list[int]) -> Any:
    """Concatenate the outputs of micro-batches along rows; scalars are averaged, weighted by rows."""
    if len(outputs) == 1:
        return outputs[0]

    def join_parts(*micro_outputs: Tensor) -> Tensor:
        if micro_outputs[0].ndim:
            return torch.cat(micro_outputs)
        row_counts = torch.tensor(
            row_numbers, dtype=torch.float32, device=micro_outputs[0].device
        )
        return (torch.stack(micro_outputs) * row_counts).sum() / row_counts.sum()

    return trees.zip_tensors(join_parts, *outputs)


def _describe_stages(
    model: nn.Module, stage_cut: StageCut, ties: Mapping[str, tuple[int, ...]]
) -> str:
    """Return a summary of the first block of each stage and its rank."""
    stage_words = []
    for stage, (start, _) in enumerate(stage_cut.ranges):
        stage_words.append(
            f"stage {stage} on pp {stage_cut.place.rank_of(stage)} from block {stage_cut.blocks[start]}"
        )
    stages = ", ".join(stage_words)
    stage_summary = (
        f"{type(model).__name__} is split into {len(stage_cut.ranges)} stages: {stages}"
    )
    if ties:
        stage_summary += "; held by several ranks, with summed gradients: " + ", ".join(
            ties
        )
    return stage_summary
