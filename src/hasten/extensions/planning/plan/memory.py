"""Formulas for the bytes that one rank needs in a training step, by kind. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final

from hasten.extensions.planning.plan.traced import (
    FLOAT32_BYTES,
    Candidate,
    ModelTrace,
    Moment,
    ParameterKind,
    Variant,
)
from hasten.runtime.bytes_plan import format_bytes
from hasten.runtime.mesh_plan import LOSS, SHARD

_MARGIN_FRACTION: Final = 0.05
"""Fraction of transient memory that is lost to fragmentation."""
_BLOCKS_AT_ONCE: Final = 2
"""Number of blocks that are unsharded at a time: the current one and the next one."""


RankBytes = tuple[float, float, float]
"""Bytes of parameters, gradients and optimizer state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
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

    def describe_kinds(self) -> str:
        """Return the kinds with their sizes as text."""
        kinds = (
            "parameters",
            "gradients",
            "optimizer",
            "activations",
            "communication",
            "margin",
        )
        kind_texts = []
        for kind in kinds:
            if getattr(self, kind):
                kind_texts.append(f"{kind} {format_bytes(getattr(self, kind))}")
        return ", ".join(kind_texts)


def local_numel(kind: ParameterKind, layout: Candidate, rank: int = 0) -> int:
    """Return the number of elements of one such parameter on the `rank`-th of its shards.

    As in DTensor, the first ranks have a whole chunk of rows, the last ones less or nothing.
    """
    local_shape = list(kind.shape)
    if kind.split is not None and layout.mesh.tp > 1:
        local_shape[kind.split] = -(-local_shape[kind.split] // layout.mesh.tp)
    if layout.sharded and local_shape:
        chunk_rows = -(-local_shape[0] // layout.mesh.size(*SHARD))
        local_shape[0] = max(0, min(chunk_rows, local_shape[0] - rank * chunk_rows))
    return prod(local_shape)


def count_rank_bytes(
    model_trace: ModelTrace, layout: Candidate, rank: int = 0
) -> RankBytes:
    """Return the bytes of parameters, gradients and optimizer state that a rank holds between steps."""
    parameter_bytes = gradient_bytes = optimizer_bytes = 0.0
    per_number = sum(model_trace.optimizer.states)
    for kind in model_trace.parameters:
        num_elements = local_numel(kind, layout, rank) * kind.count
        parameter_bytes += num_elements * kind.item
        if kind.trained:
            gradient_bytes += num_elements * kind.item
            optimizer_bytes += (
                num_elements * per_number
                + kind.count * model_trace.optimizer.counter_bytes
            )
    return parameter_bytes, gradient_bytes, optimizer_bytes


def predict_memory(
    model_trace: ModelTrace, layout: Candidate, rank_bytes: RankBytes | None = None
) -> MemoryNeed:
    """Return the memory need of a candidate on the first of its ranks. Its variant must have been traced.

    `kept` is the result of `held` for this layout, for callers that try many micro-batches.
    """
    variant = model_trace.find_variant(layout.precision, layout.recompute)
    assert variant is not None, (
        f"{layout.precision} with recompute={layout.recompute} was not traced"
    )
    parameter_bytes, gradient_bytes, optimizer_bytes = rank_bytes or count_rank_bytes(
        model_trace, layout
    )
    buffers = _count_buffers(model_trace, layout, gradient_bytes)
    peak_moment = _find_peak(model_trace, layout, variant, gradient_bytes)
    activation_bytes = _count_activations(model_trace, layout, peak_moment)
    host_bytes = 0.0
    if layout.offload:
        host_bytes = parameter_bytes + gradient_bytes + optimizer_bytes
        parameter_bytes = gradient_bytes = optimizer_bytes = 0.0
    backward_gradients = gradient_bytes
    if layout.micro_steps == 1:
        backward_gradients *= peak_moment.gradients
    # there are as many bytes of gradients as of trained parameters
    update_bytes = gradient_bytes * (1 + model_trace.optimizer.passing)
    on_device = parameter_bytes + optimizer_bytes
    working_bytes = max(
        activation_bytes + backward_gradients + buffers.backward_bytes,
        update_bytes,
        buffers.after_backward_bytes + backward_gradients,
    )
    return MemoryNeed(
        parameters=parameter_bytes,
        gradients=gradient_bytes,
        optimizer=optimizer_bytes,
        activations=activation_bytes,
        communication=buffers.always_bytes + buffers.backward_bytes,
        margin=_MARGIN_FRACTION * (working_bytes + buffers.always_bytes),
        peak=on_device + buffers.always_bytes + working_bytes,
        host=host_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Buffers:
    always_bytes: float = 0.0
    """Bytes allocated throughout training."""
    backward_bytes: float = 0.0
    """Bytes allocated during forward and backward."""
    after_backward_bytes: float = 0.0
    """Bytes allocated at the end of a backward."""


def _count_buffers(
    model_trace: ModelTrace, layout: Candidate, gradient_bytes: float
) -> _Buffers:
    """Return the bytes that the strategy adds to those of the model."""
    if not layout.sharded:
        is_replicated = layout.mesh.size(*LOSS) > 1
        # DDP's buckets are separate from the gradients
        return _Buffers(always_bytes=gradient_bytes if is_replicated else 0.0)
    gathered_item = _item_bytes(layout)
    reduced_item = FLOAT32_BYTES
    mesh = layout.mesh
    outside_bytes = model_trace.gathered_bytes(gathered_item, in_block=False)
    inside_bytes = model_trace.gathered_bytes(gathered_item, in_block=True) / mesh.tp
    trained_outside = model_trace.count_elements(in_block=False, trained=True)
    trained_inside = model_trace.count_elements(in_block=True, trained=True) / mesh.tp
    if mesh.size(*LOSS) == 1:  # one group for the whole model, which stays gathered
        num_trained = trained_inside + trained_outside
        return _Buffers(
            always_bytes=inside_bytes + outside_bytes,
            backward_bytes=0.0,
            after_backward_bytes=num_trained
            * max(gathered_item + reduced_item, 2 * reduced_item),
        )
    block_bytes = model_trace.largest_block * gathered_item / mesh.tp
    trained_block = (model_trace.largest_block - model_trace.block_frozen) / mesh.tp
    if layout.reshard:
        inside_bytes = _BLOCKS_AT_ONCE * block_bytes
    parameter_bytes = inside_bytes + outside_bytes
    gradient_buffers = (
        trained_block + trained_outside
    ) * gathered_item + _BLOCKS_AT_ONCE * trained_block * reduced_item
    return _Buffers(backward_bytes=parameter_bytes + gradient_buffers)


def _item_bytes(layout: Candidate) -> int:
    return FLOAT32_BYTES if layout.precision == "no" else 2


def _find_peak(
    model_trace: ModelTrace, layout: Candidate, variant: Variant, gradient_bytes: float
) -> Moment:
    """Return the moment of the memory peak for this micro-batch."""
    if layout.micro_steps > 1 or layout.offload:
        moment_gradients = 0.0
    else:
        moment_gradients = gradient_bytes
    # gradients are stored in the gathered precision
    if layout.sharded and layout.mesh.size(*LOSS) == 1:
        num_trained = model_trace.count_elements(trained=True)
        moment_gradients = num_trained * _item_bytes(layout)
    return max(
        variant.moments,
        key=lambda moment: (
            _count_activations(model_trace, layout, moment)
            + moment_gradients * moment.gradients
        ),
        default=Moment(activations=variant.moved),
    )


def _count_activations(
    model_trace: ModelTrace, layout: Candidate, moment: Moment
) -> float:
    mesh = layout.mesh
    activation_bytes = moment.activations.cost_of(layout.micro_batch)
    if not layout.sharded:
        # sharded parameters are gathered in this precision
        activation_bytes += moment.copies.cost_of(layout.micro_batch) / mesh.tp
    activation_bytes *= 1 - model_trace.split_share + model_trace.split_share / mesh.tp
    return activation_bytes
