"""Search over all supported layouts, ranked by predicted memory and time. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hasten.errors import ConfigError
from hasten.extensions.planning.plan.hardware import AcceleratorEntry
from hasten.extensions.planning.plan.memory import Kept, Need, held, need
from hasten.extensions.planning.plan.speed import Time, predict
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
    need: Need
    time: Time
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


def search(trace: ModelTrace, request: PlanRequest) -> LayoutPlan:
    """Return every option, ranked: those that fit first, then by time.

    Raises: ConfigError when nothing fits, with the smallest memory need found, or when the batch cannot be divided.
    """
    options = list(_options(trace, request))
    if not options:
        raise ConfigError(
            f"global batch {request.global_batch} cannot be split over {request.gpus} GPUs"
            + (
                f" in micro-batches of {request.micro_batch}"
                if request.micro_batch
                else ""
            )
            + "; choose a multiple of the number of GPUs, or fewer GPUs."
        )
    options.sort(key=_rank)
    if not options[0].fits:
        raise ConfigError(_explain_misfit(trace, request, options))
    return LayoutPlan(trace, request, tuple(options))


def _rank(option: Option) -> tuple[bool, float]:
    """Return the key of the ranking: the predicted time, with a charge for each feature beyond plain replicas."""
    layout = option.candidate
    features = (layout.offload, layout.recompute, layout.sharded, layout.mesh.tp > 1)
    charged_s = option.time.total * (1 + FEATURE_COST * sum(features))
    return not option.fits, charged_s


def _explain_misfit(
    trace: ModelTrace, request: PlanRequest, options: Sequence[Option]
) -> str:
    smallest = min(options, key=lambda option: option.need.total)
    available_bytes = request.accelerator.memory_bytes
    return (
        f"{trace.name} fits no layout on {request.gpus} x {request.accelerator.name}: the one that needs least "
        f"({smallest.candidate.full_title}) takes {format_bytes(smallest.need.total)} of {format_bytes(available_bytes)} per GPU; use more GPUs, GPUs with more "
        "memory, or shorter sequences."
    )


def _options(trace: ModelTrace, request: PlanRequest) -> Iterator[Option]:
    """Yield for every layout the fastest micro-batch that fits, and the next larger one that does not."""
    for layout in layouts(trace, request):
        kept = held(trace, layout)
        fitting: list[Option] = []
        for candidate in _batches(request, layout):
            option = _option(trace, request, candidate, kept)
            if not option.fits:
                yield option
                break
            fitting.append(option)
        if fitting:
            yield min(fitting, key=lambda option: option.time.total)


def _option(
    trace: ModelTrace, request: PlanRequest, candidate: Candidate, kept: Kept
) -> Option:
    memory = need(trace, candidate, kept)
    time = predict(trace, candidate, request.accelerator, kept)
    return Option(
        candidate, memory, time, memory.total <= request.accelerator.memory_bytes
    )


def _batches(request: PlanRequest, layout: Candidate) -> Iterator[Candidate]:
    """Yield the layout with every division of the batch into micro-batches."""
    ranks = layout.mesh.size(*BATCH)
    if request.global_batch % ranks:
        return
    each = request.global_batch // ranks
    sizes = divisors(each) if request.micro_batch is None else [request.micro_batch]
    for micro in sizes:
        if each % micro == 0:
            yield replace(layout, micro_batch=micro, micro_steps=each // micro)


def layouts(trace: ModelTrace, request: PlanRequest) -> Iterator[Candidate]:
    """Yield every strategy on every mesh, in every precision, with and without recompute, resharding and offload."""
    for mesh, sharded in _meshes(trace, request):
        reshards = (True, False) if sharded and mesh.dp_shard > 1 else (True,)
        offloads: tuple[bool, ...] = (False, True) if sharded else (False,)
        # sharding over one rank only makes sense for offload
        if sharded and mesh.world_size == 1:
            offloads = (True,)
        for variant in trace.variants:
            if variant.precision not in request.precisions:
                continue
            for reshard in reshards:
                for offload in offloads:
                    if offload and not reshard:
                        continue
                    yield Candidate(
                        mesh=mesh,
                        sharded=sharded,
                        precision=variant.precision,
                        recompute=variant.recompute,
                        reshard=reshard,
                        offload=offload,
                    )


def _meshes(trace: ModelTrace, request: PlanRequest) -> Iterator[tuple[MeshSpec, bool]]:
    """Yield the meshes of all GPUs, and whether parameters are sharded on them."""
    gpus, node = request.gpus, request.accelerator.per_node
    splits = [1, *(tp for tp in trace.tp_sizes if tp <= node and gpus % tp == 0)]
    for tp in splits:
        ranks = gpus // tp
        if tp == 1:
            yield MeshSpec(dp_replicate=ranks), False
        if gpus == 1:
            yield MeshSpec(), True
            return
        yield MeshSpec(dp_shard=ranks, tp=tp), True
        ranks_inside = max(1, node // tp)
        for shards in (ranks_inside, ranks_inside * 4):
            if 1 < shards < ranks and ranks % shards == 0:
                yield (
                    MeshSpec(dp_replicate=ranks // shards, dp_shard=shards, tp=tp),
                    True,
                )
