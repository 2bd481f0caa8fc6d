"""Diagnosis of ranks that hold different values, from the records of all ranks. Does not import torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Final, Literal

import msgspec

from hasten.runtime.mesh_plan import Axis, MeshSpec
from hasten.runtime.nodelist import ranks_in_words

Cause = Literal[
    "updates",
    "settings",
    "gradients",
    "state",
    "initialisation",
    "outside",
    "buffers",
]
EVIDENCE: Final = frozenset({"updates", "gradient"})
"""Kinds that may differ without harm, but help to find the cause of other differences."""
_MOST_SHOWN: Final = 4
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
    }
)


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One rank's value under one name."""

    kind: str
    name: str
    axes: tuple[str, ...]
    value: int
    value_text: str = ""


@dataclass(frozen=True, slots=True)
class RankDifference:
    """One value that differs, and the ranks that hold each version."""

    kind: str
    name: str
    odd: tuple[int, ...]
    """Ranks whose value differs from the majority of their group."""
    groups: tuple[tuple[int, ...], ...]
    """The groups of ranks that hold different values."""
    texts_by_rank: Mapping[int, str]


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

    def describe_report(self, consequence: str) -> str:
        """Return the report as text; `then` describes the consequence."""
        first_difference = self.differences[0]
        other_differences = self.differences[1:]
        all_ranks = set(chain(*first_difference.groups))
        other_ranks = sorted(all_ranks - set(first_difference.odd))
        reason, remedy = _CAUSES[self.cause]
        if self.agreed_at is not None:
            last_agreement = f"all agreed at update {self.agreed_at}"
        else:
            last_agreement = "never compared before"
        report_lines = [
            f"ranks hold different values: {first_difference.kind} {first_difference.name!r}, seen at update {self.step} ({last_agreement})",
            f"  {_name_parties(first_difference.odd, other_ranks)}",
        ]
        if any(first_difference.texts_by_rank.values()):
            rank_texts = []
            for rank, text in sorted(first_difference.texts_by_rank.items())[:8]:
                rank_texts.append(f"rank {rank}: {text}")
            report_lines.append("  " + "; ".join(rank_texts))
        if other_differences:
            difference_texts = []
            for difference in other_differences[:_MOST_SHOWN]:
                difference_texts.append(f"{difference.kind} {difference.name!r}")
            shown_differences = ", ".join(difference_texts)
            remainder = ""
            if len(other_differences) > _MOST_SHOWN:
                remainder = f" and {len(other_differences) - _MOST_SHOWN} more"
            report_lines.append(f"  also: {shown_differences}{remainder}")
        return "\n".join(
            [
                *report_lines,
                f"  cause: {reason}",
                f"  cure:  {remedy}",
                f"  now:   {consequence}",
            ]
        )


def _name_parties(odd_ranks: Sequence[int], other_ranks: Sequence[int]) -> str:
    """Return the ranks that differ and the others; two groups of equal size are reported symmetrically."""
    odd_words = ranks_in_words(odd_ranks)
    other_words = ranks_in_words(other_ranks)
    if len(odd_ranks) == len(other_ranks):
        return f"{other_words} and {odd_words} differ from each other"
    return f"{odd_words} {'differs' if len(odd_ranks) == 1 else 'differ'} from {other_words}"


def find_divergence(
    records: Mapping[int, Sequence[Record]],
    mesh: MeshSpec,
    update_number: int,
    agreed_at: int | None,
) -> Divergence | None:
    """Return the divergence in the ranks' records; None if all values that must be equal are equal."""
    differences = list(_find_differences(records, mesh))
    harmful_differences = []
    for difference in differences:
        if difference.kind not in EVIDENCE:
            harmful_differences.append(difference)
    if not harmful_differences:
        return None
    cause, telling_kind = _find_cause(differences, agreed_at)
    first_difference = next(
        (
            difference
            for difference in harmful_differences
            if difference.kind == telling_kind
        ),
        harmful_differences[0],
    )
    other_differences = []
    for difference in harmful_differences:
        if difference is not first_difference:
            other_differences.append(difference)
    return Divergence(
        cause,
        update_number,
        agreed_at,
        (
            first_difference,
            *other_differences,
        ),
    )


def _find_differences(
    records: Mapping[int, Sequence[Record]], mesh: MeshSpec
) -> Iterable[RankDifference]:
    records_by_name: dict[tuple[str, str], dict[int, Record]] = defaultdict(dict)
    for rank in sorted(records):
        for record in records[rank]:
            records_by_name[record.kind, record.name][rank] = record
    for (kind, name), records_by_rank in records_by_name.items():
        any_record = next(iter(records_by_rank.values()))
        odd_ranks: list[int] = []
        differing_groups: list[tuple[int, ...]] = []
        for rank_group in mesh.groups(*map(Axis, any_record.axes)):
            if records_by_rank.keys().isdisjoint(rank_group):
                continue
            minority_ranks = _minority_ranks(rank_group, records_by_rank)
            if minority_ranks:
                odd_ranks += minority_ranks
                differing_groups.append(rank_group)
        if odd_ranks:
            texts_by_rank = dict.fromkeys(chain(*differing_groups), "")
            for rank in texts_by_rank.keys() & records_by_rank.keys():
                texts_by_rank[rank] = records_by_rank[rank].value_text
            yield RankDifference(
                kind,
                name,
                tuple(sorted(odd_ranks)),
                tuple(differing_groups),
                texts_by_rank,
            )


def _minority_ranks(
    rank_group: tuple[int, ...], records_by_rank: Mapping[int, Record]
) -> list[int]:
    """Return the ranks outside the majority; of groups of equal size, the one with the lowest rank is the majority."""
    ranks_by_value: dict[int | None, list[int]] = defaultdict(list)
    for rank in rank_group:
        value = records_by_rank[rank].value if rank in records_by_rank else None
        ranks_by_value[value].append(rank)
    majority_ranks = max(
        ranks_by_value.values(), key=lambda ranks: (len(ranks), -ranks[0])
    )
    minority: list[int] = []
    for ranks in ranks_by_value.values():
        if ranks is not majority_ranks:
            minority += ranks
    return minority


def _find_cause(
    differences: Sequence[RankDifference], agreed_at: int | None
) -> tuple[Cause, str]:
    """Return the likeliest cause, and the kind of value that shows it."""
    kinds = {difference.kind for difference in differences}
    if "updates" in kinds and kinds & {"parameter", "state"}:
        return "updates", "parameter"
    if "setting" in kinds:
        return "settings", "setting"
    if "gradient" in kinds and kinds & {"parameter", "state"}:
        return "gradients", "parameter"
    if "state" in kinds:
        return "state", "state"
    if "parameter" in kinds:
        return ("initialisation" if agreed_at is None else "outside"), "parameter"
    return "buffers", "buffer"
