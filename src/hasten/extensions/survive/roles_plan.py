"""The roles of a quorum's members: which replicas exchange gradients, and which are healed by which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
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
        return tuple(member.name for member in self.active)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all members, after healing."""
        healed_names = [member.name for member, _ in self.healing]
        return tuple(sorted([*self.contributors, *healed_names]))

    def is_active(self, name: str) -> bool:
        """Return True if this replica exchanges gradients."""
        return name in self.contributors

    def source_of(self, name: str) -> Member:
        """Return the replica that sends its state to this one."""
        sources = {healed.name: source for healed, source in self.healing}
        return sources[name]

    def healed_by(self, name: str) -> list[Member]:
        """Return the replicas that receive this one's state."""
        healed_members = []
        for healed_member, source_member in self.healing:
            if source_member.name == name:
                healed_members.append(healed_member)
        return healed_members


def divide_members(members: Sequence[Member]) -> Roles:
    """Return the roles of a quorum; every member computes the same ones.

    The newest state wins. Of several histories of the same length, the one of most members wins, then the first
    name: a replica that was cut off after an update, which the others have repeated without it, is healed. At the
    start of a run all replicas take the state of one.
    """
    ordered_members = sorted(members, key=lambda member: member.name)
    joined_members = [member for member in ordered_members if not member.fresh]
    if joined_members:
        newest_step = max(member.step for member in joined_members)
        members_by_lineage: dict[str, list[Member]] = {}
        for member in joined_members:
            if member.step == newest_step:
                members_by_lineage.setdefault(member.lineage, []).append(member)
        active_members = max(
            members_by_lineage.values(), key=len
        )  # the first of equals
    else:
        active_members = [max(ordered_members, key=lambda member: member.step)]
    active_names = {member.name for member in active_members}
    source_members = cycle(active_members)
    healing_pairs = []
    for member in ordered_members:
        if member.name not in active_names:
            healing_pairs.append((member, next(source_members)))
    return Roles(tuple(active_members), tuple(healing_pairs))
