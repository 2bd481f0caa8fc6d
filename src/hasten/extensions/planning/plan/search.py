"""Search over all supported layouts, ranked by predicted memory and time. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hasten.errors import ConfigError
from hasten.extensions.planning.plan.hardware import AcceleratorEntry
from hasten.extensions.planning.plan.memory import (
    MemoryNeed,
    RankBytes,
    count_rank_bytes,
    predict_memory,
)
from hasten.extensions.planning.plan.speed import UpdateTime, predict_time
from hasten.extensions.planning.plan.traced import Candidate, ModelTrace, PrecisionName
from hasten.runtime.bytes_plan import format_bytes
from hasten.runtime.mesh_plan import BATCH, MeshSpec, divisors

FEATURE_COST: Final = 0.01
"""Share of the time that each feature beyond plain replicas must gain; predictions are not more accurate than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Request for a plan: the devices, the batch and the allowed layouts."""

    gpus: int
    accelerator: AcceleratorEntry
    global_batch: int
    precisions: tuple[PrecisionName, ...] = ("bf16", "no")
    micro_batch: int | None = None
    """Samples in a forward, if fixed by the script."""

    def __post_init__(self) -> None:
        for name in ("gpus", "global_batch"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is not a number to plan for; give at least 1."
                )


@dataclass(frozen=True, slots=True)
class Option:
    """One candidate with its prediction."""

    candidate: Candidate
    need: MemoryNeed
    time: UpdateTime
    fits: bool


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """Result of a search: options from best to worst, those that fit first."""

    trace: ModelTrace
    request: PlanRequest
    options: tuple[Option, ...]

    @property
    def best(self) -> Option:
        """The recommended option."""
        return self.options[0]


def search_layouts(model_trace: ModelTrace, plan_request: PlanRequest) -> LayoutPlan:
    """Return every option, ranked: those that fit first, then by time.

    Raises: ConfigError when nothing fits, with the smallest memory need found, or when the batch cannot be divided.
    """
    options = list(_predict_options(model_trace, plan_request))
    if not options:
        division = f"over {plan_request.gpus} GPUs"
        if plan_request.micro_batch:
            division += f" in micro-batches of {plan_request.micro_batch}"
        raise ConfigError(
            f"global batch {plan_request.global_batch} cannot be split {division}; choose a multiple of the number of GPUs, or fewer GPUs."
        )
    options.sort(key=_ranking_key)
    if not options[0].fits:
        raise ConfigError(_explain_misfit(model_trace, plan_request, options))
    return LayoutPlan(model_trace, plan_request, tuple(options))


def _ranking_key(option: Option) -> tuple[bool, float]:
    """Return the key of the ranking: the predicted time, with a charge for each feature beyond plain replicas."""
    layout = option.candidate
    used_features = (
        layout.offload,
        layout.recompute,
        layout.sharded,
        layout.mesh.tp > 1,
    )
    charged_s = option.time.total * (1 + FEATURE_COST * sum(used_features))
    return not option.fits, charged_s


def _explain_misfit(
    model_trace: ModelTrace, plan_request: PlanRequest, options: Sequence[Option]
) -> str:
    smallest_option = min(options, key=lambda option: option.need.total)
    available_bytes = plan_request.accelerator.memory_bytes
    return (
        f"{model_trace.name} fits no layout on {plan_request.gpus} x {plan_request.accelerator.name}: the one that needs least "
        f"({smallest_option.candidate.full_title}) takes {format_bytes(smallest_option.need.total)} of {format_bytes(available_bytes)} per GPU; use more GPUs, GPUs with more "
        "memory, or shorter sequences."
    )


def _predict_options(
    model_trace: ModelTrace, plan_request: PlanRequest
) -> Iterator[Option]:
    """Yield for every layout the fastest micro-batch that fits, and the next larger one that does not."""
    for layout in list_layouts(model_trace, plan_request):
        rank_bytes = count_rank_bytes(model_trace, layout)
        fitting_options: list[Option] = []
        for candidate in _divide_batch(plan_request, layout):
            option = _predict_option(model_trace, plan_request, candidate, rank_bytes)
            if not option.fits:
                yield option
                break
            fitting_options.append(option)
        if fitting_options:
            yield min(fitting_options, key=lambda option: option.time.total)


def _predict_option(
    model_trace: ModelTrace,
    plan_request: PlanRequest,
    layout: Candidate,
    rank_bytes: RankBytes,
) -> Option:
    memory_need = predict_memory(model_trace, layout, rank_bytes)
    update_time = predict_time(
        model_trace, layout, plan_request.accelerator, rank_bytes
    )
    return Option(
        layout,
        memory_need,
        update_time,
        memory_need.total <= plan_request.accelerator.memory_bytes,
    )


def _divide_batch(plan_request: PlanRequest, layout: Candidate) -> Iterator[Candidate]:
    """Yield the layout with every division of the batch into micro-batches."""
    batch_ranks = layout.mesh.size(*BATCH)
    if plan_request.global_batch % batch_ranks:
        return
    rank_batch = plan_request.global_batch // batch_ranks
    if plan_request.micro_batch is None:
        micro_batches = divisors(rank_batch)
    else:
        micro_batches = [plan_request.micro_batch]
    for micro_batch in micro_batches:
        if rank_batch % micro_batch == 0:
            yield replace(
                layout, micro_batch=micro_batch, micro_steps=rank_batch // micro_batch
            )


def list_layouts(
    model_trace: ModelTrace, plan_request: PlanRequest
) -> Iterator[Candidate]:
    """Yield every strategy on every mesh, in every precision, with and without recompute, resharding and offload."""
    for mesh, is_sharded in _list_meshes(model_trace, plan_request):
        reshard_choices = [True]
        if is_sharded and mesh.dp_shard > 1:
            reshard_choices.append(False)
        offload_choices: tuple[bool, ...] = (False, True) if is_sharded else (False,)
        # sharding over one rank only makes sense for offload
        if is_sharded and mesh.world_size == 1:
            offload_choices = (True,)
        for variant in model_trace.variants:
            if variant.precision not in plan_request.precisions:
                continue
            for reshard in reshard_choices:
                for offload in offload_choices:
                    if offload and not reshard:
                        continue
                    yield Candidate(
                        mesh=mesh,
                        sharded=is_sharded,
                        precision=variant.precision,
                        recompute=variant.recompute,
                        reshard=reshard,
                        offload=offload,
                    )


def _list_meshes(
    model_trace: ModelTrace, plan_request: PlanRequest
) -> Iterator[tuple[MeshSpec, bool]]:
    """Yield the meshes of all GPUs, and whether parameters are sharded on them."""
    num_gpus = plan_request.gpus
    node_gpus = plan_request.accelerator.per_node
    divisors = []
    for tp_size in model_trace.tp_sizes:
        if tp_size <= node_gpus and num_gpus % tp_size == 0:
            divisors.append(tp_size)
    tp_sizes = [
        1,
        *divisors,
    ]
    for tp_size in tp_sizes:
        data_ranks = num_gpus // tp_size
        if tp_size == 1:
            yield MeshSpec(dp_replicate=data_ranks), False
        if num_gpus == 1:
            yield MeshSpec(), True
            return
        yield MeshSpec(dp_shard=data_ranks, tp=tp_size), True
        ranks_inside = max(1, node_gpus // tp_size)
        for num_shards in (ranks_inside, ranks_inside * 4):
            if 1 < num_shards < data_ranks and data_ranks % num_shards == 0:
                yield (
                    MeshSpec(
                        dp_replicate=data_ranks // num_shards,
                        dp_shard=num_shards,
                        tp=tp_size,
                    ),
                    True,
                )
