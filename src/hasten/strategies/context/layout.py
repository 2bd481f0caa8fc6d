"""Which part of a sequence each context-parallel rank holds, and which parts attend to which: numbers without torch."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.errors import ConfigError
from hasten.runtime.mesh_plan import divisors


@dataclass(frozen=True, slots=True)
class Pair:
    """A chunk of this rank's queries that attends to a chunk of some rank's keys, both by their place on their rank."""

    query: int
    key: int
    diagonal: bool
    """They are the same chunk: within it, a causal mask still acts."""


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Equal chunks of a sequence over ranks.

    Balanced, every rank holds one chunk from the back and its mirror image from the front: under a causal mask late
    tokens attend to more keys than early ones, and so each rank has the same work. With `late_first` positions jump on
    every rank, the one whose chunks are neighbours included: a model that looks at positions does the same on all
    ranks. Otherwise a rank holds one chunk.
    """

    ranks: int
    balanced: bool
    late_first: bool = True

    @property
    def chunks_per_rank(self) -> int:
        """The number of chunks a rank holds."""
        return 2 if self.balanced and self.ranks > 1 else 1

    @property
    def num_chunks(self) -> int:
        """The number of chunks of a sequence."""
        return self.ranks * self.chunks_per_rank

    def chunks(self, rank: int) -> tuple[int, ...]:
        """Return the chunks of the sequence that `rank` holds, in the order in which it holds them."""
        if self.chunks_per_rank == 1:
            return (rank,)
        late = self.num_chunks - 1 - rank
        return (late, rank) if self.late_first else (rank, late)

    def order(self) -> tuple[int, ...]:
        """For each chunk of the sequence, its place when the ranks' parts are joined in order of rank."""
        held = [chunk for rank in range(self.ranks) for chunk in self.chunks(rank)]
        return tuple(held.index(chunk) for chunk in range(self.num_chunks))

    def positions(self, rank: int, length: int) -> list[int]:
        """Return the positions of the sequence that `rank` holds, in the order in which it holds them."""
        size = length // self.num_chunks
        return [chunk * size + step for chunk in self.chunks(rank) for step in range(size)]

    def pairs(self, rank: int, other: int, causal: bool) -> list[Pair]:
        """Return the chunks of `rank`'s queries that attend to chunks of `other`'s keys."""
        return [
            Pair(query, key, mine == theirs)
            for query, mine in enumerate(self.chunks(rank))
            for key, theirs in enumerate(self.chunks(other))
            if not causal or mine >= theirs
        ]

    def check(self, length: int, what: str) -> None:
        """Return if a sequence of this length can be divided into equal chunks.

        Raises: ConfigError with lengths and sizes that would work.
        """
        unit = self.num_chunks
        if length > 0 and length % unit == 0:
            return
        fits = divisors(length // self.chunks_per_rank) if length % self.chunks_per_rank == 0 else [1]
        raise ConfigError(
            f"{what} has {length} positions along its sequence, which cp_size={self.ranks} cannot divide into {unit} "
            f"equal chunks{' (two per rank, for an equal share of a causal mask)' if self.chunks_per_rank == 2 else ''}; "
            f"ranks would hold different lengths. Pad sequences to {-(-max(length, 1) // unit) * unit}, a multiple of "
            f"{unit}, or set cp_size to one of {fits[:12]}."
        )
