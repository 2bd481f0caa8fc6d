"""Copies of a run's state in the memory of its machines: who keeps whose, and which one all can go on from. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Copy:
    """The state of the ranks of one machine after an update."""

    ranks: tuple[int, ...]
    world_size: int
    step: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The newest step of which the state of every machine is held somewhere."""

    step: int
    sources: tuple[int, ...]
    """For each machine the one that has its state: itself, or the neighbour that kept a copy."""


Machines = Sequence[tuple[int, ...]]
"""The ranks of each machine."""


def group_by_folder(folders: Sequence[str]) -> list[tuple[int, ...]]:
    """The ranks of each machine, told by the folder in memory that each rank has; in order of their first ranks."""
    found: dict[str, list[int]] = {}
    for rank, folder in enumerate(folders):
        found.setdefault(folder, []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def neighbour(machine: int, count: int) -> int:
    """The machine that keeps a copy of this one's state."""
    return (machine + 1) % count


def newest_common(held: Sequence[Collection[Copy]], machines: Machines) -> Choice | None:
    """What a restarted run goes on from, given the copies that each machine holds; None when some state is lost."""
    world_size = sum(map(len, machines))
    for step in sorted({copy.step for copies in held for copy in copies}, reverse=True):
        sources = []
        for machine, ranks in enumerate(machines):
            wanted = Copy(ranks, world_size, step)
            own_first = sorted(range(len(held)), key=lambda other: other != machine)
            sources.append(next((other for other in own_first if wanted in held[other]), None))
        if None not in sources:
            return Choice(step, tuple(source for source in sources if source is not None))
    return None


def why_none(held: Sequence[Collection[Copy]], machines: Machines) -> str:
    """Why there is no step that all can go on from, in words."""
    everything = {copy for copies in held for copy in copies}
    if not everything:
        return "no machine holds a copy of it"
    world_size = sum(map(len, machines))
    fitting = {copy for copy in everything if copy.world_size == world_size and copy.ranks in machines}
    if not fitting:
        sizes = sorted({copy.world_size for copy in everything})
        return (
            f"the copies are of a run on {', '.join(map(str, sizes))} processes in another layout, and this one has {world_size} "
            f"on {len(machines)} machines"
        )
    newest = max(copy.step for copy in fitting)
    lost = [i for i, ranks in enumerate(machines) if not any(c.ranks == ranks and c.step == newest for c in fitting)]
    return f"nobody holds what machine {', '.join(map(str, lost))} had after update {newest}"
