"""Predicted time of an update: compute, communication and waiting, from a trace and a hardware table. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Final

from hasten.extensions.planning.plan import traffic
from hasten.extensions.planning.plan.hardware import AcceleratorEntry
from hasten.extensions.planning.plan.memory import Kept, held
from hasten.extensions.planning.plan.traced import (
    ITEM,
    Candidate,
    LinearCost,
    ModelTrace,
    Variant,
)
from hasten.runtime.bytes_plan import Traffic
from hasten.runtime.mesh_plan import AXES, SHARD, Axis, MeshSpec

_GB: Final = 1e9
_NODE_LATENCY_S: Final = 8e-6
_NETWORK_LATENCY_S: Final = 20e-6
_UPDATE_ACCESSES: Final = 3.0
"""Average number of reads or writes of each number by an optimizer of many small operations."""
_HOST_UPDATE_GB_S: Final = 20.0
"""Speed at which a host updates parameters in offloaded training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """Seconds of one update, by cause."""

    compute: float
    update: float
    exposed: float
    """Communication that does not overlap with compute."""
    sent: Traffic
    model_flops: float
    """Operations of all ranks, without recomputation."""

    @property
    def total(self) -> float:
        """Seconds of the whole update."""
        return self.compute + self.update + self.exposed

    def mfu(self, accelerator: AcceleratorEntry, candidate: Candidate) -> float:
        """Return the model FLOPs utilisation: the fraction of the vendor's peak in the candidate's precision."""
        peak = (
            accelerator.tflops_fp32
            if candidate.precision == "no"
            else accelerator.tflops_bf16
        )
        return self.model_flops / (self.total * peak * 1e12 * candidate.mesh.world_size)

    def words(self) -> str:
        """Return the causes with their share of the time, the largest first."""
        parts = {
            "compute": self.compute,
            "update": self.update,
            "communication": self.exposed,
        }
        shown = sorted(
            (
                (value, name)
                for name, value in parts.items()
                if value > 0.005 * self.total
            ),
            reverse=True,
        )
        return ", ".join(f"{name} {value / self.total:.0%}" for value, name in shown)


def predict(
    trace: ModelTrace,
    candidate: Candidate,
    accelerator: AcceleratorEntry,
    kept: Kept | None = None,
) -> Time:
    """Return the predicted time of one update of a candidate; `kept` as in `memory.need`."""
    variant = trace.variant(candidate.precision, candidate.recompute)
    plain = trace.variant(candidate.precision, False) or variant
    assert variant is not None, (
        f"{candidate.precision} with recompute={candidate.recompute} was not traced"
    )
    assert plain is not None, "the variant stands for it"
    mesh, steps = candidate.mesh, candidate.micro_steps
    one = micro_step(trace, candidate, variant, accelerator) + _copying(
        trace, candidate, accelerator
    )
    compute = one * steps
    sent = traffic.sent(trace, candidate)
    covered = shown = 0.0
    for axis, num_bytes in sent.items():
        seconds = num_bytes / _bandwidth(mesh, axis, accelerator) + _latency(
            trace, candidate, axis, accelerator
        )
        if axis == Axis.TP:  # a layer waits for it
            shown += seconds
        else:
            covered += seconds
    # the first gather and last reduce do not overlap
    first = covered / max(trace.num_blocks, 1) / max(steps, 1)
    samples = candidate.global_batch
    return Time(
        compute=compute,
        update=update(candidate, accelerator, kept or held(trace, candidate)),
        exposed=shown + max(0.0, covered - compute) + min(first, covered),
        sent=sent,
        model_flops=sum(line.slope for line in plain.flops.values()) * samples,
    )


def micro_step(
    trace: ModelTrace,
    candidate: Candidate,
    variant: Variant,
    accelerator: AcceleratorEntry,
) -> float:
    """Return the seconds of a forward and backward on one rank, bound by compute and memory or by kernel launches."""
    mesh, samples = candidate.mesh, candidate.micro_batch
    flops = (
        sum(
            line.at(samples) / accelerator.flops(dtype)
            for dtype, line in variant.flops.items()
        )
        / mesh.tp
    )
    split = 1 - trace.split_share + trace.split_share / mesh.tp
    line = (
        LinearCost(0.0, variant.moved.slope) if candidate.sharded else variant.moved
    )  # `_copying` accounts for the casts of parameters
    moved = line.at(samples) * split
    memory = moved / (accelerator.memory_gb_s * _GB * accelerator.memory_share)
    return max(flops + memory, variant.operations * accelerator.launch_us * 1e-6)


def _copying(
    trace: ModelTrace, candidate: Candidate, accelerator: AcceleratorEntry
) -> float:
    """Return the seconds per micro-step for casting sharded parameters and copying them to and from buffers."""
    if not candidate.sharded:
        return 0.0
    mesh, item = candidate.mesh, ITEM if candidate.precision == "no" else 2
    numbers = trace.num_parameters / mesh.tp
    gathers = 2 if candidate.reshard and mesh.size(*SHARD) > 1 else 1
    moved = numbers * (gathers * 3 * item + item + 2 * ITEM)
    return moved / (accelerator.memory_gb_s * _GB * accelerator.memory_share)


def update(candidate: Candidate, accelerator: AcceleratorEntry, kept: Kept) -> float:
    """Return the seconds of the optimizer's step on a rank that holds `kept`."""
    parameters, gradients, optimizer = kept
    numbers = parameters + gradients + optimizer
    if candidate.offload:
        moved = (parameters * candidate.micro_steps * 2 + gradients) / (
            accelerator.host_gb_s * _GB
        )
        return moved + numbers / (_HOST_UPDATE_GB_S * _GB)
    return (
        _UPDATE_ACCESSES
        * numbers
        / (accelerator.memory_gb_s * _GB * accelerator.memory_share)
    )


def _spans_nodes(mesh: MeshSpec, axis: str, per_node: int) -> bool:
    """Return whether ranks along `axis` are on several machines: ranks of inner axes are adjacent."""
    names = axis.split("+")
    outermost = min(AXES.index(Axis(name)) for name in names)
    return mesh.size(*AXES[outermost:]) > per_node


def _bandwidth(mesh: MeshSpec, axis: str, accelerator: AcceleratorEntry) -> float:
    """Return the bytes per second that one rank sends along `axis`.

    A collective over several machines uses all network links of a machine together if
    its ranks fill the machine, since only one neighbour in the ring is on another machine.
    """
    if not _spans_nodes(mesh, axis, accelerator.per_node):
        return accelerator.node_gb_s * _GB * accelerator.link_share
    names = [Axis(name) for name in axis.split("+")]
    inner = mesh.size(*AXES[max(AXES.index(name) for name in names) + 1 :])
    beside = max(1, min(accelerator.per_node // max(inner, 1), mesh.size(*names)))
    network = accelerator.network_gb_s * beside
    return min(network, accelerator.node_gb_s) * _GB * accelerator.link_share


def _latency(
    trace: ModelTrace, candidate: Candidate, axis: str, accelerator: AcceleratorEntry
) -> float:
    """Return the latency of the collectives of one update, in seconds."""
    mesh = candidate.mesh
    each = (
        _NETWORK_LATENCY_S
        if _spans_nodes(mesh, axis, accelerator.per_node)
        else _NODE_LATENCY_S
    )
    blocks = max(1, trace.num_blocks) + 1
    ranks = mesh.size(*(Axis(name) for name in axis.split("+")))
    calls = {Axis.TP: 4 * blocks, Axis.DP_REPLICATE: blocks / candidate.micro_steps}
    number = (
        calls.get(Axis(axis), 3 * blocks)
        if "+" not in axis
        else blocks / candidate.micro_steps
    )
    return each * log2(max(ranks, 2)) * number * candidate.micro_steps
