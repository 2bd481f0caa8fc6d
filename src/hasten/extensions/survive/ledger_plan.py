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

Range = tuple[int, int]
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
    returned: list[Range] = field(default_factory=list)
    """Positions given to replicas that were lost before the update was applied; they are given out first."""
    rounds: list[dict[str, list[Range]]] = field(default_factory=list)
    """Positions given out in the current window, one entry for each batch of a replica."""
    unused: dict[int, list[Range]] = field(default_factory=dict)
    """Positions that no applied update has used, by epoch: of loops that ended early, and of drop_last."""

    @property
    def left(self) -> int:
        """The number of samples of this epoch that can still be given out."""
        return (
            self.size
            - self.following
            + sum(end - start for start, end in self.returned)
        )

    @property
    def exhausted(self) -> bool:
        """True if no further batch can be given out in this epoch."""
        return self.left == 0 or (
            self.drop_last and self.left < self.rows * max(1, len(self.members))
        )

    def deal(self) -> dict[str, list[Range]]:
        """Give out one batch to each member and return the positions of each; an empty list at a short end."""
        whole = self.rows * len(self.members)
        amounts = [self.rows] * len(self.members)
        if self.left < whole:
            share, more = divmod(self.left, len(self.members))
            amounts = [share + (index < more) for index in range(len(self.members))]
        dealt = {
            name: self._take(amount)
            for name, amount in zip(self.members, amounts, strict=True)
        }
        self.rounds.append(dealt)
        return dealt

    def _take(self, amount: int) -> list[Range]:
        taken: list[Range] = []
        while amount and self.returned:
            start, end = self.returned.pop(0)
            used = min(amount, end - start)
            taken.append((start, start + used))
            amount -= used
            if start + used < end:
                self.returned.insert(0, (start + used, end))
        if amount:
            taken.append((self.following, self.following + amount))
            self.following += amount
        return merged(taken)

    def amounts(self, name: str, num_ranks: int = 1) -> tuple[int, int]:
        """Return the number of batches of this window on the ranks of a replica, and the number of those that have samples."""
        given = [
            sum(end - start for start, end in one.get(name, [])) for one in self.rounds
        ]
        return num_ranks * len(given), sum(min(number, num_ranks) for number in given)

    def commit(
        self, contributors: Sequence[str], members: Iterable[str]
    ) -> list[Range]:
        """Record an applied update of these replicas; return the positions of the others, which are given out again."""
        lost: list[Range] = []
        used: list[Range] = []
        for one in self.rounds:
            for name, ranges in one.items():
                (used if name in contributors else lost).extend(ranges)
        self.returned = merged([*self.returned, *lost])
        self.rounds = []
        self.step += 1
        text = f"{self.lineage} {self.step} {self.epoch} {sorted(contributors)} {merged(used)}"
        self.lineage = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.members = tuple(sorted(members))
        return merged(lost)

    def begin(self, epoch: int) -> None:
        """Start an epoch; what is left of the current one is recorded as unused."""
        self.close()
        self.epoch, self.following, self.returned, self.rounds = epoch, 0, [], []

    def close(self) -> None:
        """Record the samples of this epoch that no applied update has used."""
        open_ = [
            one for dealt in self.rounds for ranges in dealt.values() for one in ranges
        ]
        rest = [(self.following, self.size)] if self.following < self.size else []
        begun = self.following > 0 or bool(self.returned)
        if begun and (unused := merged([*self.returned, *open_, *rest])):
            self.unused[self.epoch] = unused

    def preview(self, name: str) -> Iterator[tuple[list[Range], bool]]:
        """Return the replica's next batches, with a flag for the epoch's last, as they will be if the members stay the same.

        Later changes of the ledger do not change them.
        """
        return _ahead(self.copied(), name)

    def copied(self) -> Ledger:
        """Return an independent copy."""
        return deepcopy(self)

    def encoded(self) -> dict[str, Any]:
        """Return the ledger as JSON values."""
        values: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return values

    @classmethod
    def decoded(cls, values: Mapping[str, Any]) -> Ledger:
        """Return the ledger that `encoded` has described."""
        return msgspec.convert(values, cls, str_keys=True)


def _ahead(ledger: Ledger, name: str) -> Iterator[tuple[list[Range], bool]]:
    """Yield the batches that the ledger gives to the replica, up to the epoch's end; it is changed by that."""
    while not ledger.exhausted:
        ranges = ledger.deal().get(name, [])
        ledger.rounds.clear()
        yield ranges, ledger.exhausted


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Return the ranges in ascending order, with adjacent ones joined."""
    found: list[Range] = []
    for start, end in sorted(ranges):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        elif start < end:
            found.append((start, end))
    return found


def part(ranges: Iterable[Range], rank: int, num_ranks: int) -> list[Range]:
    """Return the positions of one of a replica's ranks: adjacent ones, and as many as on the other ranks, or one more or fewer."""
    ranges = list(ranges)
    share, more = divmod(sum(end - start for start, end in ranges), num_ranks)
    skipped, wanted = share * rank + min(rank, more), share + (rank < more)
    found: list[Range] = []
    for start, end in ranges:
        first = min(start + skipped, end)
        last = min(first + wanted, end)
        if first < last:
            found.append((first, last))
        skipped, wanted = skipped - (first - start), wanted - (last - first)
    return found


def positions(ranges: Iterable[Range]) -> list[int]:
    """Return the positions of these ranges."""
    return [position for start, end in ranges for position in range(start, end)]
