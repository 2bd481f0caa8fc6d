"""Positions of a sequence on each context-parallel rank; pure Python."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.errors import ConfigError
from hasten.runtime.mesh_plan import divisors


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Layout of a sequence in equal chunks over ranks.

    With `balanced`, each rank holds one chunk from the back of the sequence and its mirror image from the front: under a
    causal mask late tokens attend to more keys than early ones, so each rank gets the same amount of work. The late chunk is
    the first, so that positions jump on every rank, and a model that inspects them behaves the same on all. Otherwise each
    rank holds one chunk.
    """

    ranks: int
    balanced: bool

    @property
    def chunks_per_rank(self) -> int:
        """Number of chunks on each rank."""
        return 2 if self.balanced and self.ranks > 1 else 1

    @property
    def num_chunks(self) -> int:
        """Number of chunks of a sequence."""
        return self.ranks * self.chunks_per_rank

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """Return the chunks of the sequence on `rank`, in their order there."""
        if self.chunks_per_rank == 1:
            return (rank,)
        return (self.num_chunks - 1 - rank, rank)

    def chunk_order(self) -> tuple[int, ...]:
        """Return the index of each chunk of the sequence in the concatenation of the ranks' shards."""
        stored_chunks: list[int] = []
        for rank in range(self.ranks):
            stored_chunks.extend(self.chunks_of(rank))
        return tuple(map(stored_chunks.index, range(self.num_chunks)))

    def positions_of(self, rank: int, length: int) -> list[int]:
        """Return the positions of the sequence on `rank`, in their order there."""
        chunk_size = length // self.num_chunks
        token_positions = []
        for chunk in self.chunks_of(rank):
            for offset in range(chunk_size):
                token_positions.append(chunk * chunk_size + offset)
        return token_positions

    def check(self, length: int, description: str) -> None:
        """Check that a sequence of this length divides into equal chunks.

        Raises: ConfigError with lengths and sizes that work.
        """
        num_chunks = self.num_chunks
        if length > 0 and length % num_chunks == 0:
            return
        if length % self.chunks_per_rank == 0:
            fitting_sizes = divisors(length // self.chunks_per_rank)
        else:
            fitting_sizes = [1]
        raise ConfigError(
            f"{description} has {length} positions along its sequence, which cp_size={self.ranks} cannot divide into {num_chunks} "
            f"equal chunks{' (two per rank, for an equal share of a causal mask)' if self.chunks_per_rank == 2 else ''}; "
            f"ranks would hold different lengths. Pad sequences to {-(-max(length, 1) // num_chunks) * num_chunks}, a multiple of "
            f"{num_chunks}, or set cp_size to one of {fitting_sizes[:12]}."
        )
