"""The account of an epoch's samples: which positions of its order were used, given out, or returned by lost replicas.

Every replica holds the same ledger and changes it by the same rules, so no message about samples is ever sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import msgspec

PositionRange = tuple[int, int]
"""Positions of the epoch's order from the first number up to the second, which is excluded."""


@dataclass(slots=True)
class Ledger:
    """Replicated state of a run with changing members: its updates, and the samples of the current epoch."""

    size: int
    """Number of samples in an epoch."""
    rows: int
    """Number of samples in a replica's batch, on all of its ranks."""
    drop_last: bool = False
    seed: int = 0
    step: int = 0
    """Number of updates that were applied."""
    lineage: str = ""
    """Digest of the members and samples of all updates: equal only for replicas with the same history."""
    epoch: int = 0
    members: tuple[str, ...] = ()
    """The replicas that samples of the current window are given to, in the order of the sum of their gradients."""
    following: int = 0
    """The first position that was not given out."""
    returned: list[PositionRange] = field(default_factory=list)
    """Positions given to replicas that were lost before the update was applied; they are given out first."""
    rounds: list[dict[str, list[PositionRange]]] = field(default_factory=list)
    """Positions given out in the current window, one entry for each batch of a replica."""
    unused: dict[int, list[PositionRange]] = field(default_factory=dict)
    """Positions that no applied update has used, by epoch: of loops that ended early, and of drop_last."""

    @property
    def left(self) -> int:
        """The number of samples of this epoch that can still be given out."""
        return self.size - self.following + count_positions(self.returned)

    @property
    def exhausted(self) -> bool:
        """True if no further batch can be given out in this epoch."""
        return self.left == 0 or (
            self.drop_last and self.left < self.rows * max(1, len(self.members))
        )

    def deal_batches(self) -> dict[str, list[PositionRange]]:
        """Give out one batch to each member and return the positions of each; an empty list at a short end."""
        num_samples = self.rows * len(self.members)
        batch_sizes = [self.rows] * len(self.members)
        if self.left < num_samples:
            equal_share, num_larger = divmod(self.left, len(self.members))
            batch_sizes = [
                equal_share + (index < num_larger) for index in range(len(self.members))
            ]
        ranges_by_name = {}
        for name, batch_size in zip(self.members, batch_sizes, strict=True):
            ranges_by_name[name] = self._take_positions(batch_size)
        self.rounds.append(ranges_by_name)
        return ranges_by_name

    def _take_positions(self, num_samples: int) -> list[PositionRange]:
        taken_ranges: list[PositionRange] = []
        while num_samples and self.returned:
            start, end = self.returned.pop(0)
            num_used = min(num_samples, end - start)
            taken_ranges.append((start, start + num_used))
            num_samples -= num_used
            if start + num_used < end:
                self.returned.insert(0, (start + num_used, end))
        if num_samples:
            taken_ranges.append((self.following, self.following + num_samples))
            self.following += num_samples
        return merge_ranges(taken_ranges)

    def count_batches(self, name: str, num_ranks: int = 1) -> tuple[int, int]:
        """Return the number of batches of this window on the ranks of a replica, and the number of those that have samples."""
        num_filled = 0
        for dealt_round in self.rounds:
            num_filled += min(count_positions(dealt_round.get(name, [])), num_ranks)
        return num_ranks * len(self.rounds), num_filled

    def commit_update(
        self, contributors: Sequence[str], members: Iterable[str]
    ) -> list[PositionRange]:
        """Record an applied update of these replicas; return the positions of the others, which are given out again."""
        lost_ranges: list[PositionRange] = []
        used_ranges: list[PositionRange] = []
        for dealt_round in self.rounds:
            for name, ranges in dealt_round.items():
                if name in contributors:
                    used_ranges += ranges
                else:
                    lost_ranges += ranges
        self.returned = merge_ranges([*self.returned, *lost_ranges])
        self.rounds = []
        self.step += 1
        history_text = f"{self.lineage} {self.step} {self.epoch} {sorted(contributors)} {merge_ranges(used_ranges)}"
        self.lineage = hashlib.sha256(history_text.encode()).hexdigest()[:16]
        self.members = tuple(sorted(members))
        return merge_ranges(lost_ranges)

    def begin_epoch(self, epoch: int) -> None:
        """Start an epoch; what is left of the current one is recorded as unused."""
        self.close_epoch()
        self.epoch = epoch
        self.following = 0
        self.returned = []
        self.rounds = []

    def close_epoch(self) -> None:
        """Record the samples of this epoch that no applied update has used."""
        open_ranges = []
        for dealt in self.rounds:
            for replica_ranges in dealt.values():
                for open_range in replica_ranges:
                    open_ranges.append(open_range)
        if self.following < self.size:
            remaining_ranges = [(self.following, self.size)]
        else:
            remaining_ranges = []
        has_begun = self.following > 0 or bool(self.returned)
        unused_ranges = merge_ranges([*self.returned, *open_ranges, *remaining_ranges])
        if has_begun and unused_ranges:
            self.unused[self.epoch] = unused_ranges

    def preview_batches(self, name: str) -> Iterator[tuple[list[PositionRange], bool]]:
        """Return the replica's next batches, with a flag for the epoch's last, as they will be if the members stay the same.

        Later changes of the ledger do not change them.
        """
        return _preview_batches(self.make_copy(), name)

    def make_copy(self) -> Ledger:
        """Return an independent copy."""
        return deepcopy(self)

    def to_json(self) -> dict[str, Any]:
        """Return the ledger as JSON values."""
        encoded_ledger: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return encoded_ledger

    @classmethod
    def from_json(cls, encoded_ledger: Mapping[str, Any]) -> Ledger:
        """Return the ledger that `encoded` has described."""
        return msgspec.convert(encoded_ledger, cls, str_keys=True)


def _preview_batches(
    ledger: Ledger, name: str
) -> Iterator[tuple[list[PositionRange], bool]]:
    """Yield the batches that the ledger gives to the replica, up to the epoch's end; it is changed by that."""
    while not ledger.exhausted:
        ranges = ledger.deal_batches().get(name, [])
        ledger.rounds.clear()
        yield ranges, ledger.exhausted


def merge_ranges(ranges: Iterable[PositionRange]) -> list[PositionRange]:
    """Return the ranges in ascending order, with adjacent ones joined."""
    merged_ranges: list[PositionRange] = []
    for start, end in sorted(ranges):
        if merged_ranges and merged_ranges[-1][1] == start:
            merged_ranges[-1] = (merged_ranges[-1][0], end)
        elif start < end:
            merged_ranges.append((start, end))
    return merged_ranges


def rank_positions(
    replica_ranges: Iterable[PositionRange], rank: int, num_ranks: int
) -> list[PositionRange]:
    """Return the positions of one of a replica's ranks: adjacent ones, and as many as on the other ranks, or one more or fewer."""
    replica_ranges = list(replica_ranges)
    equal_share, num_larger = divmod(count_positions(replica_ranges), num_ranks)
    num_skipped = equal_share * rank + min(rank, num_larger)
    num_wanted = equal_share + (rank < num_larger)
    ranges_of_rank: list[PositionRange] = []
    for start, end in replica_ranges:
        first_position = min(start + num_skipped, end)
        last_position = min(first_position + num_wanted, end)
        if first_position < last_position:
            ranges_of_rank.append((first_position, last_position))
        num_skipped = num_skipped - (first_position - start)
        num_wanted = num_wanted - (last_position - first_position)
    return ranges_of_rank


def count_positions(ranges: Iterable[PositionRange]) -> int:
    """Return the number of positions in these ranges."""
    return sum(end - start for start, end in ranges)


def list_positions(ranges: Iterable[PositionRange]) -> list[int]:
    """Return the positions of these ranges."""
    return [position for start, end in ranges for position in range(start, end)]
