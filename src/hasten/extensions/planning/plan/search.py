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
from hasten.runtime.bytes_plan import size
from hasten.runtime.mesh_plan import BATCH, MeshSpec, divisors

_MOST_GPUS: Final = 65_536
SIMPLER: Final = 0.03
"""Largest slowdown for which a simpler layout is preferred: predictions are not more accurate than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Request for a plan: the devices, the batch and the allowed layouts."""

    gpus: int
    accelerator: AcceleratorEntry
    global_batch: int
    precisions: tuple[PrecisionName, ...] = ("bf16", "no")
    micro_batch: int | None = None
    """Samples in a forward, if fixed by the script."""
    offload: bool = True
    """Whether host memory may be used."""
    tf32: bool = False

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
    """Result of a search: options from best to worst, those that fit first.

    The first one is the simplest of those that are nearly as fast as the fastest (`SIMPLER`).
    """

    trace: ModelTrace
    request: PlanRequest
    options: tuple[Option, ...]

    @property
    def best(self) -> Option:
        """The recommended option."""
        return self.options[0]

    @property
    def fastest(self) -> Option:
        """The fastest option that fits; equal to the best unless a simpler one is nearly as fast."""
        return min((option for option in self.options if option.fits), key=_rank)


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
        raise ConfigError(_nothing_fits(trace, request, options))
    slowest_s = options[0].time.total * (1 + SIMPLER)
    simplest = min(
        (
            option
            for option in options
            if option.fits and option.time.total <= slowest_s
        ),
        key=lambda option: (_changed(option), _rank(option)),
    )
    options.sort(key=lambda option: option is not simplest)
    return LayoutPlan(trace, request, tuple(options))


def _changed(option: Option) -> int:
    """Return the number of features that plain replicated training does not use."""
    chosen = option.candidate
    return (
        int(chosen.offload)
        + int(chosen.recompute)
        + int(chosen.sharded)
        + int(chosen.mesh.tp > 1)
    )


def _rank(option: Option) -> tuple[bool, float, int]:
    return not option.fits, round(option.time.total, 6), _changed(option)


def _nothing_fits(
    trace: ModelTrace, request: PlanRequest, options: Sequence[Option]
) -> str:
    least = min(options, key=lambda option: option.need.total)
    chosen, has = least.candidate, request.accelerator.memory_bytes
    extras = [
        word
        for word, used in (
            ("recompute", chosen.recompute),
            ("offload to host memory", chosen.offload),
        )
        if used
    ]
    text = (
        f"{trace.name} fits no layout on {request.gpus} x {request.accelerator.name}: the one that needs least "
        f"({', '.join([chosen.words, *extras])}) takes {size(least.need.total)} of {size(has)} per GPU"
    )
    gpus = request.gpus * 2
    while gpus <= _MOST_GPUS:
        larger = replace(
            request, gpus=gpus, global_batch=max(request.global_batch, gpus)
        )
        if any(option.fits for option in _options(trace, larger)):
            return f"{text}; use at least {gpus} GPUs, GPUs with more memory, or shorter sequences."
        gpus *= 2
    return f"{text}; use GPUs with more memory, shorter sequences, or a smaller model."


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
    time = predict(trace, candidate, request.accelerator, request.tf32, kept)
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
        offloads: tuple[bool, ...] = (
            (False, True) if sharded and request.offload else (False,)
        )
        # sharding over one rank only makes sense for offload
        if sharded and mesh.world_size == 1:
            offloads = (True,) if request.offload else ()
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
