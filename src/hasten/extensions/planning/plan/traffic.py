"""Bytes that a candidate's ranks send in an update, by axis: `runtime.bytes_plan` applied to a trace. No torch."""

from __future__ import annotations

from hasten.extensions.planning.plan.traced import ITEM, Candidate, ModelTrace
from hasten.runtime.bytes_plan import Traffic, Weights, data_traffic, tensor_traffic
from hasten.runtime.mesh_plan import SHARD


def weights(trace: ModelTrace, candidate: Candidate) -> Weights:
    """Return the trained parameters, by the way they are distributed."""
    whole = split = 0.0
    for kind in trace.parameters:
        if kind.trained:
            numbers = kind.numel * kind.count
            if kind.split is not None and candidate.mesh.tp > 1:
                split += numbers
            else:
                whole += numbers
    return Weights(whole=round(whole), split=round(split))


def sent(trace: ModelTrace, candidate: Candidate) -> Traffic:
    """Return the bytes that each rank sends in one update, by axis."""
    mesh, steps = candidate.mesh, candidate.micro_steps
    half = candidate.precision != "no"
    item = 2 if half else ITEM
    gathers = 2 if candidate.reshard and mesh.size(*SHARD) > 1 else 1
    total = data_traffic(
        mesh,
        weights(trace, candidate),
        item_bytes=item if candidate.sharded else ITEM,
        micro_steps=steps,
        gathers=gathers,
        sharded=candidate.sharded,
    )
    if mesh.tp > 1:
        # all-reduces of the forward are repeated
        repeated = 1.5 if candidate.recompute else 1.0
        tokens = candidate.micro_batch * trace.sequence
        layers = tensor_traffic(
            mesh,
            tokens=tokens,
            summed=round(trace.tp_summed * repeated),
            item_bytes=item,
        )
        for axis, num_bytes in layers.items():
            total[axis] = total.get(axis, 0) + num_bytes * steps
    return total
