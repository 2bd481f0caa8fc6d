"""Seekable shuffles: the index at any position of an epoch's order, computed without a table of the dataset."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

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
    """A permutation of `range(size)` that depends on (seed, epoch) and on nothing else.

    Small sizes keep a sorted-by-hash table of at most 32 KiB. Larger ones run each position through a keyed Feistel
    network over the next power of two and walk on until the value falls inside, so memory does not grow with size.
    The order is part of the format of saved positions: it must not change between versions.
    """

    size: int
    seed: int
    epoch: int
    _keys: NDArray[np.uint32] = field(init=False, repr=False, compare=False)
    _table: Indices | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert 0 <= self.size < 1 << 62, f"a shuffle of {self.size} samples is out of range"
        keys = np.array(_key_stream(self.seed, self.epoch, 2 * _ROUNDS), dtype=np.uint64).astype(np.uint32)
        object.__setattr__(self, "_keys", keys)
        table = _sorted_by_hash(self.size, keys) if self.size <= _TABLE_SIZE else None
        object.__setattr__(self, "_table", table)

    def at(self, positions: Indices) -> Indices:
        """The dataset index at each position."""
        if self._table is not None:
            return self._table[positions]
        assert not positions.size or 0 <= positions.min() <= positions.max() < self.size, "a position past the end"
        values = self._encrypt(positions)
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            values[outside] = walked = self._encrypt(values[outside])
            outside = outside[walked >= self.size]
        return values

    def _encrypt(self, x: Indices) -> Indices:
        """One pass of an alternating Feistel network: a bijection of the next power of two.

        Both halves have at most 31 bits, so the rounds run on 32-bit numbers, which processors take eight at a time.
        """
        bits = (self.size - 1).bit_length()
        low_bits = bits // 2
        low = (x & ((1 << low_bits) - 1)).astype(np.uint32)
        high = (x >> low_bits).astype(np.uint32)
        keys = self._keys
        for turn in range(0, 2 * _ROUNDS, 4):
            low ^= _hash_bits(high, keys[turn], keys[turn + 1], low_bits)
            high ^= _hash_bits(low, keys[turn + 2], keys[turn + 3], bits - low_bits)
        out = high.astype(np.int64)
        out <<= low_bits
        out |= low
        return out


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from several numbers; different parts give unrelated seeds."""
    state = 0
    for part in parts:
        state = _mix((state + _GOLDEN + (part & _MASK)) & _MASK)
    return state >> 1


def _hash_bits(x: NDArray[np.uint32], key: np.uint32, tweak: np.uint32, num_bits: int) -> NDArray[np.uint32]:
    """`num_bits` well-mixed bits of each value under two keys."""
    h = x ^ key
    h *= _STRETCH
    h ^= h >> _FOLD
    h += tweak
    h *= _SPREAD
    h >>= np.uint32(32 - num_bits)
    return h


def _sorted_by_hash(size: int, keys: NDArray[np.uint32]) -> Indices:
    """All places in the order of a 62-bit hash of theirs."""
    places = np.arange(size, dtype=np.uint32)
    high, low = (_hash_bits(places ^ keys[turn], keys[turn + 1], keys[turn + 2], 31) for turn in (0, 3))
    return np.argsort((high.astype(np.uint64) << np.uint64(31)) | low).astype(np.int64)


def _key_stream(seed: int, epoch: int, count: int) -> list[int]:
    state = derive_seed(seed, epoch)
    return [_mix((state + (turn + 1) * _GOLDEN) & _MASK) for turn in range(count)]


def _mix(x: int) -> int:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
