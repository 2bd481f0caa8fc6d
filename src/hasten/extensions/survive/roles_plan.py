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
        return tuple(member.name for member in self.active)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all members, after healing."""
        return tuple(
            sorted(
                [member.name for member in self.active]
                + [member.name for member, _ in self.healing]
            )
        )

    def is_active(self, name: str) -> bool:
        """Return True if this replica exchanges gradients."""
        return any(member.name == name for member in self.active)

    def source_of(self, name: str) -> Member:
        """Return the replica that sends its state to this one."""
        return next(
            source_member
            for healed_member, source_member in self.healing
            if healed_member.name == name
        )

    def healed_by(self, name: str) -> list[Member]:
        """Return the replicas that receive this one's state."""
        return [
            healed_member
            for healed_member, source_member in self.healing
            if source_member.name == name
        ]


def divide_members(members: Sequence[Member]) -> Roles:
    """Return the roles of a quorum; every member computes the same ones.

    The newest state wins. Of several histories of the same length, the one of most members wins, then the first
    name: a replica that was cut off after an update, which the others have repeated without it, is healed. At the
    start of a run all replicas take the state of one.
    """
    ordered_members = sorted(members, key=lambda member: member.name)
    joined_members = [member for member in ordered_members if not member.fresh]
    if joined_members:
        newest_members = [
            member
            for member in joined_members
            if member.step == max(member.step for member in joined_members)
        ]
        lineage_counts = Counter(member.lineage for member in newest_members)
        chosen_member = max(
            newest_members, key=lambda member: lineage_counts[member.lineage]
        )  # the first of equals
        active_members = [
            member
            for member in newest_members
            if member.lineage == chosen_member.lineage
        ]
    else:
        active_members = [max(ordered_members, key=lambda member: member.step)]
    active_names = {member.name for member in active_members}
    outdated_members = [
        member for member in ordered_members if member.name not in active_names
    ]
    healing_pairs = tuple(
        (member, active_members[index % len(active_members)])
        for index, member in enumerate(outdated_members)
    )
    return Roles(tuple(active_members), healing_pairs)
