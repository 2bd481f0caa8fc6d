"""Formulas for the bytes that one rank needs in a training step, by kind. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final

from hasten.extensions.planning.plan.traced import (
    ITEM,
    Candidate,
    ModelTrace,
    Moment,
    ParameterKind,
    Variant,
)
from hasten.runtime.bytes_plan import format_bytes
from hasten.runtime.mesh_plan import LOSS, SHARD

_MARGIN: Final = 0.05
"""Fraction of transient memory that is lost to fragmentation."""
_BLOCKS_AT_ONCE: Final = 2
"""Number of blocks that are unsharded at a time: the current one and the next one."""


Kept = tuple[float, float, float]
"""Bytes of parameters, gradients and optimizer state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes on the rank with the largest need."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    """Activations at the peak, including temporary allocations of operations."""
    communication: float
    """Buckets, gathered parameters, and gradients in flight."""
    margin: float
    peak: float
    """The maximum allocated at one time; not every kind is at its maximum then."""
    host: float = 0.0
    """Bytes in host memory."""

    @property
    def total(self) -> float:
        """Memory that a device must have: the peak and the margin."""
        return self.peak + self.margin

    def words(self) -> str:
        """Return the kinds with their sizes as text."""
        kinds = (
            "parameters",
            "gradients",
            "optimizer",
            "activations",
            "communication",
            "margin",
        )
        return ", ".join(
            f"{kind} {format_bytes(getattr(self, kind))}"
            for kind in kinds
            if getattr(self, kind)
        )


def local_numel(kind: ParameterKind, candidate: Candidate, rank: int = 0) -> int:
    """Return the number of elements of one such parameter on the `rank`-th of its shards.

    As in DTensor, the first ranks have a whole chunk of rows, the last ones less or nothing.
    """
    shape = list(kind.shape)
    if kind.split is not None and candidate.mesh.tp > 1:
        shape[kind.split] = -(-shape[kind.split] // candidate.mesh.tp)
    if candidate.sharded and shape:
        chunk = -(-shape[0] // candidate.mesh.size(*SHARD))
        shape[0] = max(0, min(chunk, shape[0] - rank * chunk))
    return prod(shape)


def held(trace: ModelTrace, candidate: Candidate, rank: int = 0) -> Kept:
    """Return the bytes of parameters, gradients and optimizer state that a rank holds between steps."""
    parameters = gradients = optimizer = 0.0
    per_number = sum(trace.optimizer.states)
    for kind in trace.parameters:
        numbers = local_numel(kind, candidate, rank) * kind.count
        parameters += numbers * kind.item
        if kind.trained:
            gradients += numbers * kind.item
            optimizer += (
                numbers * per_number + kind.count * trace.optimizer.counter_bytes
            )
    return parameters, gradients, optimizer


def need(trace: ModelTrace, candidate: Candidate, kept: Kept | None = None) -> Need:
    """Return the memory need of a candidate on the first of its ranks. Its variant must have been traced.

    `kept` is the result of `held` for this layout, for callers that try many micro-batches.
    """
    variant = trace.variant(candidate.precision, candidate.recompute)
    assert variant is not None, (
        f"{candidate.precision} with recompute={candidate.recompute} was not traced"
    )
    parameters, gradients, optimizer = kept or held(trace, candidate)
    buffers = _buffers(trace, candidate, gradients)
    moment = _highest(trace, candidate, variant, gradients)
    activations = _activations(trace, candidate, moment)
    passing = gradients * (1.0 if candidate.micro_steps > 1 else moment.gradients)
    trained = gradients  # as many bytes as the trained parameters
    stepping = gradients + (
        0.0 if candidate.offload else trained * trace.optimizer.passing
    )
    on_device = 0.0 if candidate.offload else parameters + optimizer
    if candidate.offload:
        passing = stepping = 0.0
    working = max(
        activations + passing + buffers.passing, stepping, buffers.ending + passing
    )
    return Need(
        parameters=0.0 if candidate.offload else parameters,
        gradients=0.0 if candidate.offload else gradients,
        optimizer=0.0 if candidate.offload else optimizer,
        activations=activations,
        communication=buffers.standing + buffers.passing,
        margin=_MARGIN * (working + buffers.standing),
        peak=on_device + buffers.standing + working,
        host=parameters + gradients + optimizer if candidate.offload else 0.0,
    )


@dataclass(frozen=True, slots=True)
class _Buffers:
    standing: float = 0.0
    """Bytes allocated throughout training."""
    passing: float = 0.0
    """Bytes allocated during forward and backward."""
    ending: float = 0.0
    """Bytes allocated at the end of a backward."""


def _buffers(trace: ModelTrace, candidate: Candidate, own: float) -> _Buffers:
    """Return the bytes that the strategy adds to those of the model."""
    if not candidate.sharded:
        several = candidate.mesh.size(*LOSS) > 1
        # DDP's buckets are separate from the gradients
        return _Buffers(standing=own if several else 0.0)
    gathered, reduced = ITEM if candidate.precision == "no" else 2, ITEM
    mesh = candidate.mesh
    outside = trace.gathered_bytes(gathered, in_block=False)
    inside = trace.gathered_bytes(gathered, in_block=True) / mesh.tp
    trained_outside = trace.elements(in_block=False, trained=True)
    trained_inside = trace.elements(in_block=True, trained=True) / mesh.tp
    if mesh.size(*LOSS) == 1:  # one group for the whole model, which stays gathered
        trained = trained_inside + trained_outside
        return _Buffers(
            standing=inside + outside,
            passing=0.0,
            ending=trained * max(gathered + reduced, 2 * reduced),
        )
    block = trace.largest_block * gathered / mesh.tp
    trained_block = (trace.largest_block - trace.block_frozen) / mesh.tp
    whole = (_BLOCKS_AT_ONCE * block if candidate.reshard else inside) + outside
    gradients = (
        trained_block + trained_outside
    ) * gathered + _BLOCKS_AT_ONCE * trained_block * reduced
    return _Buffers(passing=whole + gradients)


def _highest(
    trace: ModelTrace, candidate: Candidate, variant: Variant, gradients: float
) -> Moment:
    """Return the moment of the memory peak for this micro-batch."""
    share = 0.0 if candidate.micro_steps > 1 or candidate.offload else gradients
    # gradients are stored in the gathered precision
    if candidate.sharded and candidate.mesh.size(*LOSS) == 1:
        share = trace.elements(trained=True) * (
            ITEM if candidate.precision == "no" else 2
        )
    return max(
        variant.moments,
        key=lambda moment: (
            _activations(trace, candidate, moment) + share * moment.gradients
        ),
        default=Moment(activations=variant.moved),
    )


def _activations(trace: ModelTrace, candidate: Candidate, moment: Moment) -> float:
    mesh = candidate.mesh
    alive = moment.activations.at(candidate.micro_batch)
    if not candidate.sharded:
        # sharded parameters are gathered in this precision
        alive += moment.copies.at(candidate.micro_batch) / mesh.tp
    alive *= 1 - trace.split_share + trace.split_share / mesh.tp
    return alive
