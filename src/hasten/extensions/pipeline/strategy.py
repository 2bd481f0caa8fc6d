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
from hasten.config.sections.parallel import FullyShardedDataParallelPlugin, PipelineParallelConfig
from hasten.errors import PrepareError, StepError
from hasten.extensions.pipeline.cut import StageCut, decide, part_of, shared, work
from hasten.extensions.pipeline.learn import Learner, Signature, signature
from hasten.extensions.pipeline.passes import BlockChain, StageForward
from hasten.extensions.pipeline.schedule import (
    Learnt,
    LossOf,
    Stepper,
    WeightOf,
    checked_loss,
    refuse_unweighted,
    shares,
)
from hasten.extensions.pipeline.stage_plan import check_microbatches, default_microbatches, placement
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
from hasten.strategies.micro_batches import check_rows, share
from hasten.strategies.weight_sources import WeightSource, copy_from_rank_0, source_of
from hasten.trees import Tree


@torch.no_grad()
def average(parameters: Iterable[nn.Parameter], comm: Comm) -> None:
    """Replace each gradient by its mean over the ranks of `comm`, with one message per dtype.

    A rank without a gradient of a parameter contributes zeros. Ranks: every rank of the group.
    """
    if comm.size == 1:
        return
    by_kind: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            by_kind.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    for same in by_kind.values():
        parts = [_part(p.grad) if p.grad is not None else torch.zeros_like(_part(p)) for p in same]
        there = parts[0].new_tensor([float(p.grad is not None) for p in same])
        joined = comm.all_reduce(torch.cat([there, *(part.reshape(-1) for part in parts)]), "mean")
        flags = joined[: len(same)].tolist()
        offset = len(same)
        for parameter, part, flag in zip(same, parts, flags, strict=True):
            if flag:
                part.copy_(joined[offset : offset + part.numel()].view_as(part))
                if parameter.grad is None:
                    _give(parameter, part)
            offset += part.numel()


def _part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor.detach()


def _give(parameter: nn.Parameter, part: Tensor) -> None:
    if is_dtensor(parameter):
        parameter.grad = type(parameter.data).from_local(  # type: ignore[attr-defined]  # a method of DTensor
            part,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    else:
        parameter.grad = part


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
    def exchange(self) -> None:
        """Sum the gradients since `set_aside` over the ranks with a copy. Ranks: every rank with a copy."""
        for (parameter, group), earlier in zip(self.members, self._aside, strict=True):
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                _give(parameter, torch.zeros_like(_part(parameter)))
            assert parameter.grad is not None, "given just now"
            part = _part(parameter.grad).contiguous()
            dist.all_reduce(part, group=group)
            _part(parameter.grad).copy_(part)
            if earlier is not None:
                _part(parameter.grad).add_(_part(earlier))
        self._aside = []


def groups_of(holders: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Return a process group for each set of global ranks. Ranks: the members of each set, in the same order."""
    return {ranks: group_of(ranks) for ranks in dict.fromkeys(holders)}


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
        others = ctx.groups(*(axis for axis in AXES if axis is not Axis.PP))
        self._stage_ctx = replace(ctx, world=others)
        self._place = placement(config.schedule, comm.size, config.stages_per_rank)
        self._count = config.num_microbatches or default_microbatches(config.schedule, comm.size)
        check_microbatches(config.schedule, comm.size, self._count)
        self._shared = WeakKeyDictionary[nn.Module, SharedWeights]()
        self._ties = WeakKeyDictionary[nn.Module, dict[str, Any]]()  # Any: torch's process groups
        self._learner = Learner(comm, self._place, ctx.device)
        self._steppers = WeakKeyDictionary[nn.Module, dict[Signature, Stepper]]()
        self._copies = WeakValueDictionary[int, nn.Parameter]()
        self._quiet = False

    def __deepcopy__(self, memo: object) -> Pipeline:
        return self  # a copied model runs through the same ranks

    # -- preparing ------------------------------------------------------------------------------------------------
    def cut(self, model: nn.Module) -> nn.Module:
        """Keep only this rank's stages of the model. Ranks: every rank."""
        if forwarding.find(model, TAG) is not None:
            return model
        ctx, rank = self._ctx, self._comm.rank
        with agree(ctx.world, f"splitting {type(model).__name__} into pipeline stages"):
            cut = decide(model, self._config, self._place)
            _refuse(model)
        source = source_of(model, self._fsdp, ctx)
        if source is WeightSource.RANK_0:
            _materialise(model, ctx.device)
        if source is not WeightSource.NO_RANK:
            copy_from_rank_0(model, ctx)
        ties = shared(model, cut)
        held = {name: tuple(self._comm.ranks[i] for i in at) for name, at in ties.items() if rank in at}
        groups = groups_of(list(held.values()))
        if ctx.is_main:
            log.info(_account(model, cut, ties))
        line = BlockChain(model, cut, part_of(model, cut, rank), rank, ctx.device)
        forwarding.replace(model, StageForward(line, self._call))
        self._ties[model] = {name: groups[ranks] for name, ranks in held.items()}
        return model

    def apply(self, model: nn.Module, request: PrepareRequest, ctx: ProcessContext, precision: Precision) -> nn.Module:
        spread = self._within.apply(model, request, self._stage_ctx, precision)
        line = self._line(spread)
        if spread not in self._shared:
            line.attach(spread)
            ties, part = self._ties.get(spread, {}), line.part
            weights = SharedWeights()
            for name, parameter in named_parameters(spread):
                whole = part.whole_name(name)
                if whole in ties:
                    weights.members.append((parameter, ties[whole]))
                if whole in part.copies:
                    self._copies[id(parameter)] = parameter
            self._shared[spread] = weights
        return spread

    def undo(self, model: nn.Module) -> nn.Module:
        return self._within.undo(model)

    def clip_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Clip the gradients to a norm over all stages; a weight on two stages counts once."""
        return clip.clip_norm(
            parameters, max_norm, norm_type, across=self._comm, counts=lambda one: id(one) not in self._copies
        )

    def _line(self, model: nn.Module) -> BlockChain:
        forward = forwarding.find(model, TAG)
        if not isinstance(forward, StageForward):
            raise PrepareError(
                f"a {type(model).__name__} was passed that this Accelerator has not split into pipeline stages; pass the model that "
                "prepare() returned."
            )
        return forward.line

    # -- training -------------------------------------------------------------------------------------------------
    def forward_backward(
        self, model: nn.Module, batch: Tree, loss_of: LossOf, weigh: Weigh, weight: WeightOf | None = None
    ) -> Tensor:
        """Run forward and backward of a batch in micro-batches; return its loss on every stage. Ranks: every rank."""
        line, count, device = self._line(model), self._count, self._ctx.device
        rows = check_rows(trees.batch_size(batch), count)
        total = rows * count
        micros = [trees.slice_rows(batch, slice(i * rows, (i + 1) * rows), total) for i in range(count)]
        kind = ("train", model.training, weight is None, *signature(micros[0]))
        stepper = self._steppers.setdefault(model, {}).get(kind)
        if stepper is None:
            if weight is None and count > 1:
                refuse_unweighted(batch)
            stepper = self._steppers[model][kind] = self._new_stepper(model, line, kind, micros[0], loss_of)
        parts: Sequence[Tensor | float] = [1 / count] * count
        amount: Number | None = None
        if weight is not None:
            amounts = [checked_weight(weight(micro)) for micro in micros]
            amount, parts = sum(amounts), shares(amounts, device)
        factor = weigh(torch.ones((), device=device), amount)
        weights = self._shared[model]
        weights.set_aside()
        loss = stepper.step(micros, loss_of, factor, parts)
        weights.exchange()
        if not self._quiet and not self._spreads_itself:
            average(model.parameters(), self._peers)
        mine = torch.zeros((), device=device) if loss is None else loss
        return self._comm.broadcast(mine, self._place.rank_of(self._place.stages - 1))

    def _new_stepper(
        self, model: nn.Module, line: BlockChain, kind: Signature, micro: Tree, loss_of: LossOf
    ) -> Stepper:
        """Return the schedule for a kind of micro-batch, whose shapes are inferred. Ranks: the whole pipeline."""

        def first() -> Tensor:
            if self._count > 1:
                _refuse_batch_norm(model, self._count)
            return checked_loss(loss_of(model, micro))

        learnt = self._learner.learn(model, line, kind, first)
        return Stepper(model, line, learnt, self._count, self._config.schedule, self._comm)

    @property
    def _spreads_itself(self) -> bool:
        return self._ctx.mesh.size(Axis.DP_SHARD) > 1

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        before, self._quiet = self._quiet, True
        try:
            with self._within.no_sync(model):
                yield
        finally:
            self._quiet = before

    # -- forward only ---------------------------------------------------------------------------------------------
    def _call(self, forward: StageForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of the whole model; None on ranks that do not receive it. Ranks: every rank of the pipeline."""
        model, line = forward.module, forward.line
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
        rows = trees.batch_size((args, kwargs))
        size = max(1, -(-(rows or 1) // self._count))
        cuts = [slice(start, start + size) for start in range(0, rows or 1, size)]
        micros = [trees.slice_rows((args, kwargs), cut, rows) for cut in cuts] if rows else [(args, kwargs)]
        learnt: list[Learnt] = []
        for micro in micros:
            kind = ("forward", model.training, *signature(micro))
            learnt.append(self._learner.learn(model, line, kind, partial(forward.through, *micro)))
        outputs = self._run_through(line, forward, micros, learnt)
        last = self._place.rank_of(self._place.stages - 1)
        result = (
            _joined(outputs, [min(cut.stop, rows or 1) - cut.start for cut in cuts])
            if self._comm.rank == last
            else None
        )
        return share(result, self._comm, last) if forward.gathers_output else result

    def _run_through(
        self, line: BlockChain, forward: StageForward, micros: list[Any], learnt: list[Learnt]
    ) -> list[Any]:  # Any: arguments and outputs of the model
        """Return the outputs of all micro-batches, on the rank of the last stage."""
        rank_of, here, ranks, group = self._place.rank_of, self._comm.rank, self._comm.ranks, self._comm.group
        local_outputs: dict[tuple[int, int], Tensor] = {}
        sends: list[tuple[Any, Tensor]] = []  # Any: torch's work handles
        outputs: list[Any] = []
        for stage in line.stages:
            for number, (args, kwargs) in enumerate(micros):
                received = None
                if stage and rank_of(stage - 1) == here:
                    received = local_outputs.pop((stage - 1, number))
                elif stage:
                    received = torch.empty_like(learnt[number].inputs[stage], device=line.device, requires_grad=False)
                    dist.recv(received, ranks[rank_of(stage - 1)], group=group)
                at = line.begin(stage, received, learnt[number].seen)
                output = line.run(at, partial(forward.through, args, kwargs))
                if at.final:
                    outputs.append(output)
                elif rank_of(stage + 1) == here:
                    local_outputs[stage, number] = output
                else:
                    sent = output.detach().contiguous()
                    sends.append((dist.isend(sent, ranks[rank_of(stage + 1)], group=group), sent))
        for handle, _ in sends:
            handle.wait()
        return outputs

    # -- state ----------------------------------------------------------------------------------------------------
    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:  # Any: tensors and extra state
        """Return the unsharded state of all stages on the CPU of the main process; {} elsewhere. Ranks: every rank."""
        part = self._line(model).part
        own: dict[str, Any] = {}
        for key, value in model.state_dict(keep_vars=True).items():
            if is_dtensor(value):
                value = whole_of(value)
            own[key] = value.detach() if isinstance(value, Tensor) else value
        found: dict[str, Any] = {}
        for position in range(self._comm.size):
            theirs = share({key: own[key] for key in own if key in part.own_keys}, self._comm, position)
            if self._ctx.is_main:
                found |= {key: value.cpu() if isinstance(value, Tensor) else value for key, value in theirs.items()}
        for first, *others in part.ties:
            found |= {name: found[first] for name in others if first in found}
        return {key: found[key] for key in part.state_keys} if self._ctx.is_main else {}

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

    def apply(self, model: nn.Module, request: PrepareRequest, ctx: ProcessContext, precision: Precision) -> nn.Module:
        return self._pipeline.cut(model)

    def undo(self, model: nn.Module) -> nn.Module:
        return model


def _refuse(model: nn.Module) -> None:
    """Raise for settings of the model that stages cannot run with, and turn its cache off."""
    if getattr(model, "is_gradient_checkpointing", False):
        raise PrepareError(
            f"{type(model).__name__} recomputes activations around the calls of its blocks, where pipeline stages begin. Turn its "
            "gradient checkpointing off, and set fsdp.activation_checkpointing=True or recompute."
        )
    for key in ("config", "generation_config"):
        settings: Any = getattr(model, key, None)  # Any: transformers' settings of the model
        if getattr(settings, "use_cache", False):
            settings.use_cache = False
            log.info(
                "%s: %s.use_cache is set to False: a stage does not have the keys of other stages",
                type(model).__name__,
                key,
            )


def _refuse_batch_norm(model: nn.Module, count: int) -> None:
    """Raise for a layer that normalises over the batch, of which it would see one micro-batch at a time."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    name = next((name for name, part in model.named_modules() if isinstance(part, kinds) and part.training), None)
    if name is not None:
        raise StepError(
            f"{name!r} normalises by the mean and variance of its batch, but under pipeline parallelism it sees one of {count} "
            "micro-batches at a time, so the results would differ from those of the whole batch. Use GroupNorm or LayerNorm, freeze its "
            "statistics with .eval(), or set pp_handler.num_microbatches=1 with schedule='gpipe'."
        )


def _materialise(model: nn.Module, device: torch.device) -> None:
    """Allocate meta tensors on the ranks that hold no values; the values come from rank 0 afterwards."""

    def real(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    model._apply(real)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _joined(outputs: list[Any], rows: list[int]) -> Any:  # Any: the model's outputs
    """Concatenate the outputs of micro-batches along rows; scalars are averaged, weighted by rows."""
    if len(outputs) == 1:
        return outputs[0]

    def join(*parts: Tensor) -> Tensor:
        if parts[0].ndim:
            return torch.cat(parts)
        share = torch.tensor(rows, dtype=torch.float32, device=parts[0].device)
        return (torch.stack(parts) * share).sum() / share.sum()

    return trees.zip_tensors(join, *outputs)


def _account(model: nn.Module, cut: StageCut, ties: Mapping[str, tuple[int, ...]]) -> str:
    """Return a summary of each stage: its blocks, its rank and its share of the estimated work."""
    blocks = list(model.get_submodule(cut.container).children())
    before, after = (sum(work(model.get_submodule(name)) for name in side) for side in (cut.first, cut.last))
    costs = [sum(work(block) for block in blocks[start:stop]) for start, stop in cut.ranges]
    costs[0] += before
    costs[-1] += after
    total = sum(costs) or 1.0
    prefix = f"{cut.container}." if cut.container else ""
    lines = []
    for stage, (start, stop) in enumerate(cut.ranges):
        held = [*(cut.first if stage == 0 else ()), f"{prefix}{cut.blocks[start]}"]
        held[-1] += f" to {prefix}{cut.blocks[stop - 1]}" if stop - start > 1 else ""
        held += cut.last if stage == len(cut.ranges) - 1 else ()
        lines.append(
            f"stage {stage} (pp {cut.place.rank_of(stage)}): {', '.join(held)}, {costs[stage] / total:.0%} of the work"
        )
    text = f"{type(model).__name__} is split into {len(cut.ranges)} stages: " + "; ".join(lines)
    if ties:
        text += "; held by several ranks, with summed gradients: " + ", ".join(ties)
    return text
