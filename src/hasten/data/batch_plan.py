"""Split of a loader over ranks and steps, and the shuffled order with random access; pure functions without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hasten.config.sections.loop import Pad
from hasten.errors import ConfigError

Indices = NDArray[np.int64]

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_TABLE_SIZE: Final = 4096
_ROUNDS: Final = 8
_STRETCH: Final = np.uint32(0x7FEB352D)
_SPREAD: Final = np.uint32(0x846CA68B)
_FOLD: Final = np.uint32(15)


@dataclass(frozen=True)
class Shuffle:
    """A permutation of `range(size)` that depends only on (seed, epoch).

    Small sizes use a sorted-by-hash table of at most 32 KiB. Larger ones run each position through a keyed Feistel
    network over the next power of two, repeatedly until the value is in range, so memory does not grow with size.
    The order is part of the format of saved positions: it must not change between versions.
    """

    size: int
    seed: int
    epoch: int
    _keys: NDArray[np.uint32] = field(init=False, repr=False, compare=False)
    _table: Indices | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert 0 <= self.size < 1 << 62, (
            f"a shuffle of {self.size} samples is out of range"
        )
        keys = np.zeros(2 * _ROUNDS, dtype=np.uint32)
        key_state = derive_seed(self.seed, self.epoch)
        for key_index in range(2 * _ROUNDS):
            key_state = (key_state + _GOLDEN) & _MASK
            keys[key_index] = _mix_bits(key_state) & 0xFFFFFFFF
        table: Indices | None = None
        if self.size <= _TABLE_SIZE:
            positions = np.arange(self.size, dtype=np.uint32)
            high_bits = _hash_bits(positions ^ keys[0], keys[1], keys[2], 31)
            low_bits = _hash_bits(positions ^ keys[3], keys[4], keys[5], 31)
            # 62 bits
            hashes = (high_bits.astype(np.uint64) << np.uint64(31)) | low_bits
            table = np.argsort(hashes).astype(np.int64)
        object.__setattr__(self, "_keys", keys)
        object.__setattr__(self, "_table", table)

    def at(self, positions: Indices) -> Indices:
        """Return the dataset index at each position."""
        if self._table is not None:
            return self._table[positions]
        assert (
            not positions.size or 0 <= positions.min() <= positions.max() < self.size
        ), "a position past the end"
        indices = self._encrypt(positions)
        outside_positions = np.flatnonzero(indices >= self.size)
        while outside_positions.size:
            indices[outside_positions] = next_indices = self._encrypt(
                indices[outside_positions]
            )
            outside_positions = outside_positions[next_indices >= self.size]
        return indices

    def _encrypt(self, positions: Indices) -> Indices:
        """Apply an alternating Feistel network once: a bijection of the next power of two.

        Both halves have at most 31 bits, so the rounds run on 32-bit numbers, which vectorise eight at a time.
        """
        num_bits = (self.size - 1).bit_length()
        low_bits = num_bits // 2
        low_half = (positions & ((1 << low_bits) - 1)).astype(np.uint32)
        high_half = (positions >> low_bits).astype(np.uint32)
        keys = self._keys
        for round_index in range(0, 2 * _ROUNDS, 4):
            low_half ^= _hash_bits(
                high_half, keys[round_index], keys[round_index + 1], low_bits
            )
            high_half ^= _hash_bits(
                low_half,
                keys[round_index + 2],
                keys[round_index + 3],
                num_bits - low_bits,
            )
        indices = high_half.astype(np.int64)
        indices <<= low_bits
        indices |= low_half
        return indices


def derive_seed(*numbers: int) -> int:
    """Return a 63-bit seed from several numbers; different parts give unrelated seeds."""
    mixed_state = 0
    for number in numbers:
        mixed_state = _mix_bits((mixed_state + _GOLDEN + (number & _MASK)) & _MASK)
    return mixed_state >> 1


def _hash_bits(
    numbers: NDArray[np.uint32], key: np.uint32, tweak: np.uint32, num_bits: int
) -> NDArray[np.uint32]:
    """Return `num_bits` well-mixed bits of each value under two keys."""
    hashes = numbers ^ key
    hashes *= _STRETCH
    hashes ^= hashes >> _FOLD
    hashes += tweak
    hashes *= _SPREAD
    hashes >>= np.uint32(32 - num_bits)
    return hashes


def _mix_bits(number: int) -> int:
    """Apply the finaliser of splitmix64: every input bit affects every output bit."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


@dataclass(frozen=True, slots=True)
class DataRanks:
    """Data-parallel rank of each process of the world; the first process reads for all."""

    shard: int
    num_shards: int
    shard_of: tuple[int, ...]


SINGLE_RANK: Final = DataRanks(0, 1, (0,))
"""The data-parallel ranks for a rank whose order is independent of other ranks."""


class RankShare(NamedTuple):
    """A contiguous piece of the global order; positions past the epoch's size are padding."""

    first: int
    rows: int
    real: int


class Padding(NamedTuple):
    """Number of real rows of a batch, and of all its rows; None when only its tensors show it."""

    real: int
    rows: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPlan:
    """Split of an epoch for one rank; equal on all ranks except for `shard`."""

    num_shards: int
    shard: int
    global_batch: int
    """Number of units that all ranks together take in one step."""
    drop_last: bool = False
    even: bool = True
    pad: Pad = "least"

    @property
    def rows(self) -> int:
        """Number of units this rank takes in a full step."""
        return self.part(self.global_batch).rows

    @property
    def max_padding(self) -> int:
        """Maximum number of units from the start of an epoch that pad its end."""
        return self.global_batch if self.pad == "full" else self.num_shards

    def steps(self, size: int, start: int = 0) -> int:
        """Return the number of batches this rank reads from position `start` of an epoch of `size` units."""
        num_full_steps, tail_size = divmod(max(size - start, 0), self.global_batch)
        return num_full_steps + int(
            self.tail(size, start) is not None if tail_size else 0
        )

    def tail(self, size: int, start: int = 0) -> RankShare | None:
        """Return this rank's share of the last, short step of the epoch, if there is one."""
        num_left = max(size - start, 0) % self.global_batch
        if num_left == 0 or self.drop_last:
            return None
        share = self.part(num_left, size - num_left)
        return share if share.rows else None

    def share(self, size: int, step: int, start: int = 0) -> RankShare:
        """Return this rank's share of the `step`-th step after position `start`."""
        first_unit = start + step * self.global_batch
        if first_unit + self.global_batch <= size:
            return self.part(self.global_batch, first_unit)
        share = self.tail(size, start)
        assert share is not None, (
            f"step {step} is past the end of {size} units from {start}"
        )
        return share

    def assign(
        self, size: int, start: int = 0, chunk_size: int = 8192
    ) -> Iterator[Indices]:
        """Yield this rank's positions, step by step, as rows of arrays that hold about `chunk` positions each.

        The last array may be one shorter row: the tail, whose padding wraps to the start of the epoch.
        """
        full_share = self.part(self.global_batch)
        num_full_steps = max(size - start, 0) // self.global_batch
        per_chunk = max(chunk_size // max(full_share.rows, 1), 1)
        offsets = start + full_share.first + np.arange(full_share.rows, dtype=np.int64)
        for first_step in range(0, num_full_steps, per_chunk):
            steps = np.arange(
                first_step, min(first_step + per_chunk, num_full_steps), dtype=np.int64
            )
            yield steps[:, None] * self.global_batch + offsets
        tail_share = self.tail(size, start)
        if tail_share is not None:
            yield (
                np.arange(
                    tail_share.first, tail_share.first + tail_share.rows, dtype=np.int64
                )
                % size
            )[None, :]

    def part(self, left: int, first: int = 0, shard: int | None = None) -> RankShare:
        """Return the share of this rank, or of `shard`, in a step of `left` units that starts at `first`."""
        share = split_units(
            left,
            self.num_shards,
            self.shard if shard is None else shard,
            self.even,
            # short steps are cut like full ones, or their units spread over the ranks
            self.global_batch if self.pad == "full" else None,
        )
        return share._replace(first=first + share.first)


def plan_rows(
    *,
    batch_size: int,
    num_shards: int,
    shard: int,
    split: bool,
    drop_last: bool,
    even: bool,
    pad: Pad = "least",
) -> LoaderPlan:
    """Return the plan for a loader with a fixed batch size.

    Raises: ConfigError when a global batch cannot be split over the ranks.
    """
    if split and (batch_size % num_shards if even else batch_size < num_shards):
        smaller_size = batch_size // num_shards * num_shards
        if smaller_size:
            choices = f"{smaller_size} or {smaller_size + num_shards}"
        else:
            choices = f"{num_shards}"
        raise ConfigError(
            f"split_batches=True with batch_size={batch_size} over {num_shards} data-parallel processes leaves some "
            f"with fewer samples than others in every step, which biases averaged gradients. Set batch_size to "
            f"{choices}{', or even_batches=False to accept unequal shares' if even and smaller_size else ''}."
        )
    return LoaderPlan(
        num_shards=num_shards,
        shard=shard,
        global_batch=batch_size if split else batch_size * num_shards,
        drop_last=drop_last,
        even=even,
        pad=pad,
    )


def plan_batches(
    *,
    num_shards: int,
    shard: int,
    split: bool,
    drop_last: bool,
    even: bool,
) -> LoaderPlan:
    """Return the plan for a loader whose batches are formed by the user: a unit is a batch."""
    if split:  # every rank takes rows of each batch, so all ranks read the same batches
        return LoaderPlan(
            num_shards=1,
            shard=0,
            global_batch=1,
            drop_last=False,
            even=even,
        )
    return LoaderPlan(
        num_shards=num_shards,
        shard=shard,
        global_batch=num_shards,
        drop_last=drop_last,
        even=even,
    )


def split_units(
    size: int, num_shards: int, shard: int, even: bool, full_size: int | None = None
) -> RankShare:
    """Return the share of `shard` in `size` units, or in the `full_size` units of a full step if given.

    An even share may extend past the end, into padding.
    """
    if full_size is not None:
        num_rows = -(-full_size // num_shards)
        num_real = min(max(size - shard * num_rows, 0), num_rows)
        return RankShare(shard * num_rows, num_rows if even else num_real, num_real)
    if even:
        num_rows = -(-size // num_shards)
        return RankShare(
            shard * num_rows, num_rows, min(max(size - shard * num_rows, 0), num_rows)
        )
    num_rows, num_longer = divmod(size, num_shards)
    share_rows = num_rows + (shard < num_longer)
    return RankShare(shard * num_rows + min(shard, num_longer), share_rows, share_rows)
