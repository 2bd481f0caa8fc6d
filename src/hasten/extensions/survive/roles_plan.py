"""The roles of a quorum's members: which replicas exchange gradients, and which are healed by which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Member(NamedTuple):
    """A replica as it is known to the lighthouse."""

    name: str
    step: int
    lineage: str
    """Digest of the replica's history; replicas at the same step may differ in it after one was cut off."""
    fresh: bool
    """True if the replica has not joined the run: it has the weights of its script, or of a checkpoint."""
    store: str
    """host:port of the store at which an exchange group of this replica is formed."""
    heal: str
    """host:port at which the replica receives the state of another."""


@dataclass(frozen=True, slots=True)
class Roles:
    """Division of a quorum: replicas with the run's newest state, and those that receive it."""

    active: tuple[Member, ...]
    """The replicas that exchange gradients, in the order of the sum."""
    healing: tuple[tuple[Member, Member], ...]
    """Pairs of a replica that receives the run's state, and the one that sends it."""

    @property
    def contributors(self) -> tuple[str, ...]:
        """The names of the replicas that exchange gradients, in the order of the sum."""
        return tuple(one.name for one in self.active)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all members, after healing."""
        return tuple(
            sorted(
                [one.name for one in self.active]
                + [one.name for one, _ in self.healing]
            )
        )

    def is_active(self, name: str) -> bool:
        """Return True if this replica exchanges gradients."""
        return any(one.name == name for one in self.active)

    def source_of(self, name: str) -> Member:
        """Return the replica that sends its state to this one."""
        return next(source for one, source in self.healing if one.name == name)

    def healed_by(self, name: str) -> list[Member]:
        """Return the replicas that receive this one's state."""
        return [one for one, source in self.healing if source.name == name]


def divide(members: Sequence[Member]) -> Roles:
    """Return the roles of a quorum; every member computes the same ones.

    The newest state wins. Of several histories of the same length, the one of most members wins, then the first
    name: a replica that was cut off after an update, which the others have repeated without it, is healed. At the
    start of a run all replicas take the state of one.
    """
    ordered = sorted(members, key=lambda one: one.name)
    joined = [one for one in ordered if not one.fresh]
    if joined:
        newest = [one for one in joined if one.step == max(one.step for one in joined)]
        counts = Counter(one.lineage for one in newest)
        chosen = max(newest, key=lambda one: counts[one.lineage])  # the first of equals
        active = [one for one in newest if one.lineage == chosen.lineage]
    else:
        active = [max(ordered, key=lambda one: one.step)]
    names = {one.name for one in active}
    behind = [one for one in ordered if one.name not in names]
    pairs = tuple(
        (one, active[index % len(active)]) for index, one in enumerate(behind)
    )
    return Roles(tuple(active), pairs)
