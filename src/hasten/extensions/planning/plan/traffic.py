"""Bytes that a candidate's ranks send in an update, by axis: `runtime.bytes_plan` applied to a trace. No torch."""

from __future__ import annotations

from hasten.extensions.planning.plan.traced import FLOAT32_BYTES, Candidate, ModelTrace
from hasten.runtime.bytes_plan import Traffic, Weights, data_traffic, tensor_traffic
from hasten.runtime.mesh_plan import SHARD


def count_weights(model_trace: ModelTrace, layout: Candidate) -> Weights:
    """Return the trained parameters, by the way they are distributed."""
    num_whole = num_split = 0.0
    for kind in model_trace.parameters:
        if kind.trained:
            num_elements = kind.numel * kind.count
            if kind.split is not None and layout.mesh.tp > 1:
                num_split += num_elements
            else:
                num_whole += num_elements
    return Weights(whole=round(num_whole), split=round(num_split))


def count_sent_bytes(model_trace: ModelTrace, layout: Candidate) -> Traffic:
    """Return the bytes that each rank sends in one update, by axis."""
    mesh = layout.mesh
    micro_steps = layout.micro_steps
    is_half_precision = layout.precision != "no"
    item_bytes = 2 if is_half_precision else FLOAT32_BYTES
    num_gathers = 2 if layout.reshard and mesh.size(*SHARD) > 1 else 1
    sent_bytes = data_traffic(
        mesh,
        count_weights(model_trace, layout),
        item_bytes=item_bytes if layout.sharded else FLOAT32_BYTES,
        micro_steps=micro_steps,
        gathers=num_gathers,
        sharded=layout.sharded,
    )
    if mesh.tp > 1:
        # all-reduces of the forward are repeated
        forward_repeats = 1.5 if layout.recompute else 1.0
        num_tokens = layout.micro_batch * model_trace.sequence
        layer_bytes = tensor_traffic(
            mesh,
            tokens=num_tokens,
            summed=round(model_trace.tp_summed * forward_repeats),
            item_bytes=item_bytes,
        )
        for axis, num_bytes in layer_bytes.items():
            sent_bytes[axis] = sent_bytes.get(axis, 0) + num_bytes * micro_steps
    return sent_bytes
