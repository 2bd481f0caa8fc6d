"""Diagnosis of ranks that hold different values, from the records of all ranks. Does not import torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import msgspec

from hasten.runtime.mesh_plan import Axis, MeshSpec
from hasten.runtime.nodelist import ranks_in_words

Cause = Literal[
    "updates", "settings", "data", "random", "gradients", "state", "initialisation", "outside", "buffers", "statistics"
]
EVIDENCE: Final = frozenset({"updates", "gradient", "random"})
"""Kinds that may differ without harm, but help to find the cause of other differences."""
_SHOWN: Final = 4
_CAUSES: Final[Mapping[Cause, tuple[str, str]]] = MappingProxyType(
    {
        "updates": (
            "the ranks applied different numbers of updates: step() is called on some ranks only.",
            "call optimizer.step() equally often on every rank: check for a call inside an `if` that depends on the rank or on the batch.",
        ),
        "settings": (
            "an option of the optimizer differs, so the same gradients lead to different weights: a scheduler or an assignment to "
            "param_groups ran on some ranks only.",
            "prepare() the scheduler, and set options from values that are equal on all ranks, such as a reduced validation loss.",
        ),
        "data": (
            "the ranks are at different batches: some have read or skipped a batch that others have not.",
            "read and skip the same batches on every rank; the usual cause is next(iterator) or `continue` under a condition that "
            "differs between ranks.",
        ),
        "random": (
            "ranks of one tensor-parallel group draw different random numbers, so dropout dropped different elements of "
            "activations that must be equal.",
            "call set_seed(seed) with the same seed on every rank, with device_specific=False within a group.",
        ),
        "gradients": (
            "the ranks use different gradients: they were not averaged, because backward ran inside no_sync(), or the loss bypassed the "
            "prepared model (model.module(...), another method, direct use of its weights). Under tensor "
            "parallelism: ranks of a group read different batches, or a weight was changed on one of them.",
            "call the model that prepare() returned, and call step() outside no_sync(); use the same batch on all ranks of a "
            "tensor-parallel group.",
        ),
        "state": (
            "the optimizer's state differs: an earlier update used gradients that were not averaged, or state was loaded or edited "
            "on some ranks only.",
            "load and edit state on every rank, and do not step inside no_sync().",
        ),
        "initialisation": (
            "they differed in the first comparison: weights were initialised, loaded or edited differently on each rank, without a "
            "common seed "
            "or outside prepare().",
            "call set_seed(seed) before the model is built, load the same file on every rank, and change weights before prepare().",
        ),
        "outside": (
            "gradients and optimizer agree, so other code has changed the weights on some ranks: an in-place edit, weights loaded on "
            "one rank, a callback of the main process.",
            "make the same edit on every rank, from the same numbers (accelerator.broadcast), or before prepare().",
        ),
        "buffers": (
            "this buffer is not synchronised, and ranks have written different values into it.",
            "compute it from reduced values (accelerator.reduce), or let DDP copy it from rank 0: "
            "DistributedDataParallelKwargs(broadcast_buffers=True).",
        ),
        "statistics": (
            "running statistics of a normalisation layer are not synchronised between ranks. The weights agree, but evaluation and the "
            "checkpoint use the statistics of rank 0.",
            "use torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before prepare(), or under DDP "
            "DistributedDataParallelKwargs(broadcast_buffers=True).",
        ),
    }
)


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One rank's value under one name."""

    kind: str
    name: str
    axes: tuple[str, ...]
    value: int
    said: str = ""
    statistics: bool = False


@dataclass(frozen=True, slots=True)
class RankDifference:
    """One value that differs, and the ranks that hold each version."""

    kind: str
    name: str
    odd: tuple[int, ...]
    """Ranks whose value differs from the majority of their group."""
    groups: tuple[tuple[int, ...], ...]
    """The groups of ranks that hold different values."""
    said: Mapping[int, str]
    statistics: bool


@dataclass(frozen=True, slots=True)
class Divergence:
    """A divergence: the differing values, the ranks and the cause."""

    cause: Cause
    step: int
    agreed_at: int | None
    """The latest update at which all ranks agreed; None if there was none."""
    differences: tuple[RankDifference, ...]
    """All harmful differences, starting with the most informative one."""

    @property
    def odd(self) -> tuple[int, ...]:
        """Ranks in the minority."""
        return self.differences[0].odd

    @property
    def mild(self) -> bool:
        """True if training is correct nevertheless."""
        return self.cause == "statistics"

    def message(self, then: str) -> str:
        """Return the report as text; `then` describes the consequence."""
        first, rest = self.differences[0], self.differences[1:]
        others = sorted({rank for group in first.groups for rank in group} - set(first.odd))
        reason, cure = _CAUSES[self.cause]
        before = f"all agreed at update {self.agreed_at}" if self.agreed_at is not None else "never compared before"
        lines = [
            f"ranks hold different values: {first.kind} {first.name!r}, seen at update {self.step} ({before})",
            f"  {_parties(first.odd, others)}",
        ]
        if any(first.said.values()):
            lines.append("  " + "; ".join(f"rank {rank}: {said}" for rank, said in sorted(first.said.items())[:8]))
        if rest:
            more = ", ".join(f"{one.kind} {one.name!r}" for one in rest[:_SHOWN])
            lines.append(f"  also: {more}{f' and {len(rest) - _SHOWN} more' if len(rest) > _SHOWN else ''}")
        return "\n".join([*lines, f"  cause: {reason}", f"  cure:  {cure}", f"  now:   {then}"])


def _parties(odd: Sequence[int], others: Sequence[int]) -> str:
    """Return the ranks that differ and the others; two groups of equal size are reported symmetrically."""
    one, two = ranks_in_words(odd), ranks_in_words(others)
    if len(odd) == len(others):
        return f"{two} and {one} differ from each other"
    return f"{one} {'differs' if len(odd) == 1 else 'differ'} from {two}"


def find(
    records: Mapping[int, Sequence[Record]], mesh: MeshSpec, step: int, agreed_at: int | None
) -> Divergence | None:
    """Return the divergence in the ranks' records; None if all values that must be equal are equal."""
    found = list(_differences(records, mesh))
    harmful = [one for one in found if one.kind not in EVIDENCE]
    if not harmful:
        return None
    cause, telling = _cause(found, mesh, agreed_at)
    first = next((one for one in harmful if one.kind == telling), harmful[0])
    return Divergence(cause, step, agreed_at, (first, *(one for one in harmful if one is not first)))


def _differences(records: Mapping[int, Sequence[Record]], mesh: MeshSpec) -> Iterable[RankDifference]:
    held: dict[tuple[str, str], dict[int, Record]] = defaultdict(dict)
    for rank in sorted(records):
        for record in records[rank]:
            held[record.kind, record.name][rank] = record
    for (kind, name), by_rank in held.items():
        example = next(iter(by_rank.values()))
        odd: list[int] = []
        groups: list[tuple[int, ...]] = []
        for group in mesh.groups(*map(Axis, example.axes)):
            if any(rank in by_rank for rank in group) and (few := _minority(group, by_rank)):
                odd += few
                groups.append(group)
        if odd:
            said = {rank: by_rank[rank].said if rank in by_rank else "" for group in groups for rank in group}
            yield RankDifference(kind, name, tuple(sorted(odd)), tuple(groups), said, example.statistics)


def _minority(group: tuple[int, ...], by_rank: Mapping[int, Record]) -> list[int]:
    """Return the ranks outside the majority; of groups of equal size, the one with the lowest rank is the majority."""
    camps: dict[int | None, list[int]] = defaultdict(list)
    for rank in group:
        camps[by_rank[rank].value if rank in by_rank else None].append(rank)
    most = max(camps.values(), key=lambda camp: (len(camp), -camp[0]))
    return [rank for camp in camps.values() if camp is not most for rank in camp]


def _cause(found: Sequence[RankDifference], mesh: MeshSpec, agreed_at: int | None) -> tuple[Cause, str]:
    """Return the likeliest cause, and the kind of value that shows it."""
    kinds = {one.kind for one in found}
    along_tp = {one.kind for one in found if _along_tp(one, mesh)}
    if "updates" in kinds and kinds & {"parameter", "state"}:
        return "updates", "parameter"
    if "setting" in kinds:
        return "settings", "setting"
    if "data" in along_tp:
        return "data", "data"
    if "random" in along_tp and along_tp & {"gradient", "parameter"}:
        return "random", "parameter"
    if "gradient" in kinds and kinds & {"parameter", "state"}:
        return "gradients", "parameter"
    if "state" in kinds:
        return "state", "state"
    if "parameter" in kinds:
        return ("initialisation" if agreed_at is None else "outside"), "parameter"
    if "data" in kinds:
        return "data", "data"
    buffers = [one for one in found if one.kind == "buffer"]
    return ("statistics" if all(one.statistics for one in buffers) else "buffers"), "buffer"


def _along_tp(difference: RankDifference, mesh: MeshSpec) -> bool:
    """Return whether ranks of one tensor-parallel group differ."""
    odd = set(difference.odd)
    return any(0 < len(odd.intersection(group)) < len(group) for group in mesh.groups(Axis.TP))
