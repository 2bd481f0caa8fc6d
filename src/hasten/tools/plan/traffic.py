"""Bytes that a candidate's ranks send in an update, by axis: `runtime.bytes_plan` applied to a trace. No torch."""

from __future__ import annotations

from hasten.runtime.bytes_plan import Traffic, Weights, context_traffic, data_traffic, stage_traffic, tensor_traffic
from hasten.runtime.mesh_plan import SHARD, Axis
from hasten.tools.plan.traced import ITEM, Candidate, ModelTrace


def weights(trace: ModelTrace, candidate: Candidate) -> Weights:
    """Return the trained parameters of a rank's stage, by the way they are distributed."""
    whole = split = 0.0
    for kind in trace.parameters:
        if kind.trained:
            numbers = kind.numel * kind.count / (candidate.mesh.pp if kind.in_block else 1)
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
        item=item if candidate.sharded else ITEM,
        micro_steps=steps,
        gathers=gathers,
        sharded=candidate.sharded,
    )
    tokens = candidate.micro_batch * trace.sequence // mesh.cp
    extra: list[Traffic] = []
    if mesh.tp > 1:
        repeated = 1.5 if candidate.recompute else 1.0  # all-reduces of the forward are repeated
        extra.append(tensor_traffic(mesh, tokens=tokens, summed=round(trace.tp_summed * repeated / mesh.pp), item=item))
    if mesh.cp > 1:
        one = context_traffic(
            mesh, way="allgather", causal=True, tokens=tokens, keys=trace.key_width, queries=trace.width, item=item
        )
        extra.append({axis: value * trace.num_blocks / mesh.pp for axis, value in one.items()})
    if mesh.pp > 1:
        extra.append(stage_traffic(mesh, stage=1 if mesh.pp > 2 else 0, tokens=tokens, width=trace.width, item=item))
    for part in extra:
        for axis, num_bytes in part.items():
            total[axis] = total.get(axis, 0) + num_bytes * steps
    return total


def hidden(axis: str) -> bool:
    """Return whether traffic along `axis` overlaps with compute: only that of data parallelism does."""
    return axis not in (Axis.TP, Axis.CP, Axis.PP)
