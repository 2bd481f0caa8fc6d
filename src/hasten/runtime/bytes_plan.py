"""Formulas for the bytes a rank holds and sends under a mesh, as pure numbers without torch.

"Sent" is what leaves a rank when a collective over n ranks is done in the fewest bytes: (n-1)/n of the whole tensor for gathering,
reduce-scattering and all-to-all, twice that for an all-reduce, all of it for a message to one rank. Sizes are taken to divide evenly.
"""

from __future__ import annotations

from dataclasses import dataclass

from hasten.runtime.axes import EXPERTS, SHARD, Axis, MeshSpec

Traffic = dict[str, float]
"""Bytes each rank sends, by axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Numbers of parameters of one model (of one stage, under a pipeline), by the way they are spread."""

    whole: int
    """Spread by data parallelism alone."""
    split: int = 0
    """Of layers split over `tp`."""
    experts: int = 0
    """Of experts divided over `ep`."""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes one rank holds between two steps."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer


def exchanged(num_bytes: float, ranks: int) -> float:
    """Bytes each rank sends to gather, reduce-scatter or exchange a tensor of `num_bytes` over `ranks`."""
    return num_bytes * (ranks - 1) / ranks


def all_reduced(num_bytes: float, ranks: int) -> float:
    """Bytes each rank sends to sum a tensor of `num_bytes` over `ranks`."""
    return 2 * exchanged(num_bytes, ranks)


def held_bytes(mesh: MeshSpec, weights: Weights, *, item: int = 4, moments: int = 2) -> Held:
    """What each rank holds of parameters, gradients and the `moments` an optimizer keeps of each parameter."""
    _, shards, parts = mesh.expert_sizes
    number = (weights.whole + weights.split / mesh.tp) / mesh.size(*SHARD) + weights.experts / (shards * parts)
    return Held(number * item, number * item, number * item * moments)


def data_traffic(
    mesh: MeshSpec, weights: Weights, *, item: int = 4, reduce_item: int = 4, micro_steps: int = 1, gathers: int = 2
) -> Traffic:
    """What data parallelism sends in one step.

    Shards are gathered `gathers` times in each micro-step (again for the backward, unless they are kept) and reduced once;
    copies are summed once in each step.
    """
    sent: Traffic = {}
    copies, shards, _ = mesh.expert_sizes
    parts = (
        (weights.whole + weights.split / mesh.tp, mesh.dp_replicate, mesh.size(*SHARD)),
        (weights.experts / mesh.ep, copies, shards),
    )
    for number, copied, sharded in parts:
        once = gathers * exchanged(number * item, sharded) + exchanged(number * reduce_item, sharded)
        _add(sent, Axis.DP_SHARD, micro_steps * once)
        _add(sent, Axis.DP_REPLICATE, all_reduced(number * reduce_item / sharded, copied))
    return _some(sent)


def expert_traffic(
    mesh: MeshSpec, *, tokens: int, k: int, width: int, num_experts: int, item: int = 4, weight_item: int = 4
) -> Traffic:
    """What one module of experts sends in one micro-step of `tokens` on each rank, of which each chooses `k` experts.

    Hidden states and weights travel there and results back, and so do the gradients; counts travel once.
    """
    rows = tokens * k
    there = exchanged(rows * (width * item + weight_item), mesh.ep)
    back = exchanged(rows * width * item, mesh.ep)
    return _some({EXPERTS: 2 * (there + back) + exchanged(num_experts * 8, mesh.ep)})


def tensor_traffic(
    mesh: MeshSpec, *, tokens: int, width: int, colwise: int, rowwise: int, gathered: int = 0, item: int = 4
) -> Traffic:
    """What split layers send in one micro-step of `tokens`, where the layers around them are `width` wide.

    The outputs of `rowwise` layers (and of embeddings split by rows) are summed; so are the gradients of the inputs of
    `colwise` layers. `gathered` is the width of outputs that are gathered (a head).
    """
    summed = (colwise + rowwise) * all_reduced(tokens * width * item, mesh.tp)
    return _some({Axis.TP: summed + exchanged(tokens * gathered * item, mesh.tp)})


def stage_traffic(mesh: MeshSpec, *, stage: int, tokens: int, width: int, item: int = 4) -> Traffic:
    """What a pipeline stage sends for one batch of `tokens`: hidden states onward, and their gradients back."""
    messages = (stage < mesh.pp - 1) + (stage > 0)
    return _some({Axis.PP: messages * tokens * width * item})


def _add(sent: Traffic, axis: str, num_bytes: float) -> None:
    sent[axis] = sent.get(axis, 0) + num_bytes


def _some(sent: Traffic) -> Traffic:
    return {str(axis): num_bytes for axis, num_bytes in sent.items() if num_bytes}


def shown(sent: Traffic) -> str:
    """The bytes by axis for people: `dp_shard 1.5 MiB, ep 0.2 MiB`."""
    return ", ".join(f"{axis} {num_bytes / 2**20:.1f} MiB" for axis, num_bytes in sent.items()) or "nothing"
