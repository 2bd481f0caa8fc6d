"""Predicted time of an update: compute, communication and waiting, from a trace and a hardware table. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Final

from hasten.extensions.planning.plan import traffic
from hasten.extensions.planning.plan.hardware import AcceleratorEntry
from hasten.extensions.planning.plan.memory import RankBytes, count_rank_bytes
from hasten.extensions.planning.plan.traced import (
    FLOAT32_BYTES,
    Candidate,
    LinearCost,
    ModelTrace,
    Variant,
)
from hasten.runtime.bytes_plan import Traffic
from hasten.runtime.mesh_plan import AXES, SHARD, Axis, MeshSpec

_GIGABYTE: Final = 1e9
_NODE_LATENCY_S: Final = 8e-6
_NETWORK_LATENCY_S: Final = 20e-6
_UPDATE_ACCESSES: Final = 3.0
"""Average number of reads or writes of each number by an optimizer of many small operations."""
_HOST_UPDATE_GB_S: Final = 20.0
"""Speed at which a host updates parameters in offloaded training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTime:
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

    def mfu(self, gpu_entry: AcceleratorEntry, layout: Candidate) -> float:
        """Return the model FLOPs utilisation: the fraction of the vendor's peak in the candidate's precision."""
        if layout.precision == "no":
            peak_tflops = gpu_entry.tflops_fp32
        else:
            peak_tflops = gpu_entry.tflops_bf16
        return self.model_flops / (
            self.total * peak_tflops * 1e12 * layout.mesh.world_size
        )

    def words(self) -> str:
        """Return the causes with their share of the time, the largest first."""
        seconds_by_cause = {
            "compute": self.compute,
            "update": self.update,
            "communication": self.exposed,
        }
        relevant_causes = []
        for cause, cause_s in seconds_by_cause.items():
            if cause_s > 0.005 * self.total:
                relevant_causes.append((cause_s, cause))
        relevant_causes = sorted(
            relevant_causes,
            reverse=True,
        )
        return ", ".join(
            f"{cause} {cause_s / self.total:.0%}" for cause_s, cause in relevant_causes
        )


def predict_time(
    model_trace: ModelTrace,
    layout: Candidate,
    gpu_entry: AcceleratorEntry,
    rank_bytes: RankBytes | None = None,
) -> UpdateTime:
    """Return the predicted time of one update of a candidate; `kept` as in `memory.need`."""
    variant = model_trace.find_variant(layout.precision, layout.recompute)
    variant_without_recompute = (
        model_trace.find_variant(layout.precision, False) or variant
    )
    assert variant is not None, (
        f"{layout.precision} with recompute={layout.recompute} was not traced"
    )
    assert variant_without_recompute is not None, "the variant stands for it"
    mesh = layout.mesh
    micro_steps = layout.micro_steps
    micro_step_s = predict_micro_step(
        model_trace, layout, variant, gpu_entry
    ) + _predict_copies(model_trace, layout, gpu_entry)
    compute_s = micro_step_s * micro_steps
    sent_bytes = traffic.count_sent_bytes(model_trace, layout)
    overlapping_s = exposed_s = 0.0
    for axis, num_bytes in sent_bytes.items():
        transfer_s = num_bytes / _bytes_per_second(
            mesh, axis, gpu_entry
        ) + _predict_latency(model_trace, layout, axis, gpu_entry)
        if axis == Axis.TP:  # a layer waits for it
            exposed_s += transfer_s
        else:
            overlapping_s += transfer_s
    # the first gather and last reduce do not overlap
    first_transfer_s = (
        overlapping_s / max(model_trace.num_blocks, 1) / max(micro_steps, 1)
    )
    num_samples = layout.global_batch
    return UpdateTime(
        compute=compute_s,
        update=predict_optimizer_time(
            layout, gpu_entry, rank_bytes or count_rank_bytes(model_trace, layout)
        ),
        exposed=exposed_s
        + max(0.0, overlapping_s - compute_s)
        + min(first_transfer_s, overlapping_s),
        sent=sent_bytes,
        model_flops=sum(line.slope for line in variant_without_recompute.flops.values())
        * num_samples,
    )


def predict_micro_step(
    model_trace: ModelTrace,
    layout: Candidate,
    variant: Variant,
    gpu_entry: AcceleratorEntry,
) -> float:
    """Return the seconds of a forward and backward on one rank, bound by compute and memory or by kernel launches."""
    mesh = layout.mesh
    num_samples = layout.micro_batch
    compute_s = (
        sum(
            line.cost_of(num_samples) / gpu_entry.flops(dtype)
            for dtype, line in variant.flops.items()
        )
        / mesh.tp
    )
    rank_share = 1 - model_trace.split_share + model_trace.split_share / mesh.tp
    line = (
        LinearCost(0.0, variant.moved.slope) if layout.sharded else variant.moved
    )  # `_copying` accounts for the casts of parameters
    moved_bytes = line.cost_of(num_samples) * rank_share
    memory_s = moved_bytes / (
        gpu_entry.memory_gb_s * _GIGABYTE * gpu_entry.memory_share
    )
    return max(compute_s + memory_s, variant.operations * gpu_entry.launch_us * 1e-6)


def _predict_copies(
    model_trace: ModelTrace, layout: Candidate, gpu_entry: AcceleratorEntry
) -> float:
    """Return the seconds per micro-step for casting sharded parameters and copying them to and from buffers."""
    if not layout.sharded:
        return 0.0
    mesh = layout.mesh
    item_bytes = FLOAT32_BYTES if layout.precision == "no" else 2
    num_elements = model_trace.num_parameters / mesh.tp
    num_gathers = 2 if layout.reshard and mesh.size(*SHARD) > 1 else 1
    moved_bytes = num_elements * (
        num_gathers * 3 * item_bytes + item_bytes + 2 * FLOAT32_BYTES
    )
    return moved_bytes / (gpu_entry.memory_gb_s * _GIGABYTE * gpu_entry.memory_share)


def predict_optimizer_time(
    layout: Candidate, gpu_entry: AcceleratorEntry, rank_bytes: RankBytes
) -> float:
    """Return the seconds of the optimizer's step on a rank that holds `kept`."""
    parameter_bytes, gradient_bytes, state_bytes = rank_bytes
    total_bytes = parameter_bytes + gradient_bytes + state_bytes
    if layout.offload:
        transfer_s = (parameter_bytes * layout.micro_steps * 2 + gradient_bytes) / (
            gpu_entry.host_gb_s * _GIGABYTE
        )
        return transfer_s + total_bytes / (_HOST_UPDATE_GB_S * _GIGABYTE)
    return (
        _UPDATE_ACCESSES
        * total_bytes
        / (gpu_entry.memory_gb_s * _GIGABYTE * gpu_entry.memory_share)
    )


def _spans_nodes(mesh: MeshSpec, axis: str, per_node: int) -> bool:
    """Return whether ranks along `axis` are on several machines: ranks of inner axes are adjacent."""
    axis_names = axis.split("+")
    outermost_index = min(AXES.index(Axis(name)) for name in axis_names)
    return mesh.size(*AXES[outermost_index:]) > per_node


def _bytes_per_second(mesh: MeshSpec, axis: str, gpu_entry: AcceleratorEntry) -> float:
    """Return the bytes per second that one rank sends along `axis`.

    A collective over several machines uses all network links of a machine together if
    its ranks fill the machine, since only one neighbour in the ring is on another machine.
    """
    if not _spans_nodes(mesh, axis, gpu_entry.per_node):
        return gpu_entry.node_gb_s * _GIGABYTE * gpu_entry.link_share
    axes = list(map(Axis, axis.split("+")))
    inner_ranks = mesh.size(*AXES[max(map(AXES.index, axes)) + 1 :])
    parallel_links = max(
        1, min(gpu_entry.per_node // max(inner_ranks, 1), mesh.size(*axes))
    )
    network_gb_s = gpu_entry.network_gb_s * parallel_links
    return min(network_gb_s, gpu_entry.node_gb_s) * _GIGABYTE * gpu_entry.link_share


def _predict_latency(
    model_trace: ModelTrace, layout: Candidate, axis: str, gpu_entry: AcceleratorEntry
) -> float:
    """Return the latency of the collectives of one update, in seconds."""
    mesh = layout.mesh
    if _spans_nodes(mesh, axis, gpu_entry.per_node):
        latency_s = _NETWORK_LATENCY_S
    else:
        latency_s = _NODE_LATENCY_S
    num_groups = max(1, model_trace.num_blocks) + 1
    num_ranks = mesh.size(*map(Axis, axis.split("+")))
    calls_by_axis = {
        Axis.TP: 4 * num_groups,
        Axis.DP_REPLICATE: num_groups / layout.micro_steps,
    }
    if "+" not in axis:
        num_calls = calls_by_axis.get(Axis(axis), 3 * num_groups)
    else:
        num_calls = num_groups / layout.micro_steps
    return latency_s * log2(max(num_ranks, 2)) * num_calls * layout.micro_steps
