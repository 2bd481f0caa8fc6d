"""Formulas for the bytes a rank holds and sends under a mesh, as pure numbers without torch.

"Sent" is what leaves a rank when a collective over n ranks is done in the fewest bytes: (n-1)/n of the whole tensor for gathering,
reduce-scattering and all-to-all, twice that for an all-reduce, all of it for a message to one rank. Sizes are taken to divide evenly.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from hasten.errors import ConfigError
from hasten.runtime.mesh_plan import EXPERTS, LOSS, SHARD, Axis, MeshSpec

ContextWay = Literal["allgather", "ring", "ulysses"]
Traffic = dict[str, float]
"""Bytes each rank sends, by axis."""
_BILLION: Final = 10**9
_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB")


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
    """Return bytes each rank sends to gather, reduce-scatter or exchange a tensor of `num_bytes` over `ranks`."""
    return num_bytes * (ranks - 1) / ranks


def all_reduced(num_bytes: float, ranks: int) -> float:
    """Return bytes each rank sends to sum a tensor of `num_bytes` over `ranks`."""
    return 2 * exchanged(num_bytes, ranks)


def held_bytes(mesh: MeshSpec, weights: Weights, *, item: int = 4, moments: int = 2, sharded: bool = True) -> Held:
    """What each rank holds of parameters, gradients and the `moments` an optimizer keeps of each parameter.

    `sharded` says that parameters are sharded where the mesh allows it; without, the ranks of one sequence hold copies (DDP).
    """
    _, shards, parts = mesh.expert_sizes
    around = mesh.size(*SHARD) if sharded else 1
    number = (weights.whole + weights.split / mesh.tp) / around + weights.experts / (shards * parts)
    return Held(number * item, number * item, number * item * moments)


def data_traffic(
    mesh: MeshSpec,
    weights: Weights,
    *,
    item: int = 4,
    reduce_item: int = 4,
    micro_steps: int = 1,
    gathers: int = 2,
    sharded: bool = True,
) -> Traffic:
    """What data parallelism sends in one step.

    Shards are gathered `gathers` times in each micro-step (again for the backward, unless they are kept) and reduced once;
    copies are summed once in each step. `sharded` is that of `held_bytes`.
    """
    sent: Traffic = {}
    if not sharded:
        axis = "+".join(axis for axis in LOSS if mesh.size(axis) > 1)
        _add(sent, axis, all_reduced(weights.whole * reduce_item, mesh.size(*LOSS)))
        return _some(sent)
    copies, shards, _ = mesh.expert_sizes
    parts = (
        (weights.whole + weights.split / mesh.tp, mesh.dp_replicate, mesh.size(*SHARD)),
        (weights.experts / mesh.ep, copies, shards),
    )
    for number, copied, spread in parts:
        once = gathers * exchanged(number * item, spread) + exchanged(number * reduce_item, spread)
        _add(sent, Axis.DP_SHARD, micro_steps * once)
        _add(sent, Axis.DP_REPLICATE, all_reduced(number * reduce_item / spread, copied))
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


def tensor_traffic(mesh: MeshSpec, *, tokens: int, summed: int, gathered: int = 0, item: int = 4) -> Traffic:
    """What split layers send in one micro-step of `tokens`.

    `summed` adds up the widths that are summed over the ranks: outputs of layers split by rows (and of embeddings), and inputs of
    layers split by columns, for their gradients. `gathered` adds up the widths of outputs that are gathered (a head).
    """
    sums = all_reduced(tokens * summed * item, mesh.tp)
    return _some({Axis.TP: sums + exchanged(tokens * gathered * item, mesh.tp)})


def context_traffic(
    mesh: MeshSpec, *, way: ContextWay, causal: bool, tokens: int, keys: int, queries: int, item: int = 4
) -> Traffic:
    """What one attention sends in one micro-step of `tokens` on each rank, without masks.

    `queries` and `keys` are the widths of all heads of the queries, and of the keys as of the values. allgather and ring take keys and
    values to every rank, again in the backward (unless they are kept: allgather without a causal mask), and bring their
    gradients back, in float32 where they are sums; ulysses exchanges queries, keys, values and outputs, and the gradients of all.
    """
    ranks, once = mesh.cp, tokens * keys
    if way == "ulysses":
        sent = 2 * exchanged(2 * tokens * (queries + keys) * item, ranks)
    elif way == "ring":
        sent = 4 * (ranks - 1) * once * item + 2 * ranks * once * 4
    elif causal:
        sent = 4 * (ranks - 1) * once * item + 2 * (ranks - 1) * once * 4
    else:
        sent = 4 * (ranks - 1) * once * item
    return _some({Axis.CP: sent if ranks > 1 else 0})


def stage_traffic(
    mesh: MeshSpec, *, stage: int, tokens: int, width: int, item: int = 4, stages_per_rank: int = 1
) -> Traffic:
    """What the stages of a pipeline rank send for one batch of `tokens`: hidden states onward, and their gradients back.

    `stage` is the rank's place along the axis. With several stages on each rank, one follows the other around the ring of ranks.
    """
    first, last = stage == 0, stage == mesh.pp - 1
    messages = 2 * stages_per_rank - first - last
    return _some({Axis.PP: messages * tokens * width * item})


def _add(sent: Traffic, axis: str, num_bytes: float) -> None:
    sent[axis] = sent.get(axis, 0) + num_bytes


def _some(sent: Traffic) -> Traffic:
    return {str(axis): num_bytes for axis, num_bytes in sent.items() if num_bytes}


def shown(sent: Traffic) -> str:
    """Return the bytes by axis for people: `dp_shard 1.5 MiB, ep 0.2 KiB`."""
    return ", ".join(f"{axis} {size(num_bytes)}" for axis, num_bytes in sent.items()) or "nothing"


def size(num_bytes: float) -> str:
    """Return a number of bytes in the unit that suits it."""
    unit = next((unit for unit in _UNITS if abs(num_bytes) < 1024 * 1024 ** _UNITS.index(unit)), _UNITS[-1])
    return f"{num_bytes / 1024 ** _UNITS.index(unit):.{0 if unit == 'bytes' else 1}f} {unit}"


def outlook(mesh: MeshSpec, *, micro_steps: int = 1, sharded: bool = True) -> list[str]:
    """What a rank of `mesh` holds and sends for every billion parameters, for people who have not named a model yet.

    In float32 with AdamW. One line for each way in which this mesh spreads parameters; stages are taken to be equal.
    """
    number = _BILLION // mesh.pp
    kinds = [("parameters of split layers", Weights(whole=0, split=number))] if mesh.tp > 1 else []
    kinds += [("parameters" if not kinds else "other parameters", Weights(whole=number))]
    if mesh.ep > 1:
        kinds.append(("parameters of experts", Weights(whole=0, experts=number)))
    lines = []
    for name, weights in kinds:
        held = held_bytes(mesh, weights, sharded=sharded)
        sent = data_traffic(mesh, weights, micro_steps=micro_steps, sharded=sharded)
        lines.append(f"{name}: holds {size(held.total)} ({size(held.parameters)} of weights); sends {shown(sent)}")
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What one process sends in one direction while all of them reduce, in GB/s; None for links that do not exist."""

    device: str
    machines: int
    per_machine: int
    node_gb_s: float | None = None
    """To processes of the same machine."""
    network_gb_s: float | None = None
    """To other machines: the machine's speed, shared by its processes."""

    def write(self, path: Path | str) -> None:
        """Write a YAML file."""
        Path(path).write_text(yaml.safe_dump(asdict(self), sort_keys=False), "utf-8")


def read(path: Path | str) -> Links:
    """What `Links.write` wrote.

    Raises: ConfigError for a file that cannot be read, lacks a field or has another one, or holds a speed that is none.
    """
    try:
        content: Any = yaml.safe_load(Path(path).read_text("utf-8"))  # Any: whatever is in the file
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"the link speeds in {path} cannot be read: {str(error).splitlines()[0]}; measure them with `hasten test --links {path}`."
        ) from error
    names = {spec.name for spec in fields(Links)}
    speeds = [content.get(name) for name in ("node_gb_s", "network_gb_s")] if isinstance(content, dict) else []
    good = all(speed is None or (isinstance(speed, int | float) and speed > 0) for speed in speeds)
    if not isinstance(content, dict) or content.keys() != names or not good:
        raise ConfigError(
            f"{path} does not hold link speeds (the fields are {', '.join(sorted(names))}, speeds are above 0), so it says nothing about "
            f"this cluster; measure them with `hasten test --links {path}`."
        )
    return Links(**content)
