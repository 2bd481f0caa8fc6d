"""Seekable shuffles: the index at any position of an epoch's order, computed without a table of the dataset."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_TABLE_SIZE: Final = 1024
_ROUNDS: Final = 8
_STRETCH: Final = np.uint64(0xBF58476D1CE4E5B9)
_SPREAD: Final = np.uint64(0x94D049BB133111EB)
_FOLD: Final = np.uint64(31)


@dataclass(frozen=True)
class Shuffle:
    """A permutation of `range(size)` that depends on (seed, epoch) and on nothing else.

    Small sizes keep a sorted-by-hash table of at most 8 KiB. Larger ones run each position through a keyed Feistel
    network over the next power of two and walk on until the value falls inside, so memory does not grow with size.
    The order is part of the format of saved positions: it must not change between versions.
    """

    size: int
    seed: int
    epoch: int
    _keys: NDArray[np.uint64] = field(init=False, repr=False, compare=False)
    _table: Indices | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert 0 <= self.size < 1 << 62, f"a shuffle of {self.size} samples is out of range"
        keys = np.array(_key_stream(self.seed, self.epoch, _ROUNDS), dtype=np.uint64)
        object.__setattr__(self, "_keys", keys)
        table = _sorted_by_hash(self.size, keys) if self.size <= _TABLE_SIZE else None
        object.__setattr__(self, "_table", table)

    def at(self, positions: Indices) -> Indices:
        """The dataset index at each position."""
        if self._table is not None:
            return self._table[positions]
        values = self._encrypt(positions.astype(np.uint64))
        limit = np.uint64(self.size)
        outside = np.flatnonzero(values >= limit)
        while outside.size:
            values[outside] = self._encrypt(values[outside])
            outside = outside[values[outside] >= limit]
        return values.view(np.int64)

    def _encrypt(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """One pass of an alternating Feistel network: a bijection of the next power of two."""
        bits = (self.size - 1).bit_length()
        low_bits = bits // 2
        high_bits = bits - low_bits
        low = x & np.uint64((1 << low_bits) - 1)
        high = x >> np.uint64(low_bits)
        for turn in range(0, _ROUNDS, 2):
            low ^= _hash_bits(high, self._keys[turn], low_bits)
            high ^= _hash_bits(low, self._keys[turn + 1], high_bits)
        high <<= np.uint64(low_bits)
        high |= low
        return high


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from several numbers; different parts give unrelated seeds."""
    state = 0
    for part in parts:
        state = _mix((state + _GOLDEN + (part & _MASK)) & _MASK)
    return state >> 1


def _hash_bits(x: NDArray[np.uint64], key: np.uint64, num_bits: int) -> NDArray[np.uint64]:
    """`num_bits` well-mixed bits of each value under `key`."""
    h = x ^ key
    h *= _STRETCH
    h ^= h >> _FOLD
    h *= _SPREAD
    h >>= np.uint64(64 - num_bits)
    return h


def _sorted_by_hash(size: int, keys: NDArray[np.uint64]) -> Indices:
    h = np.arange(size, dtype=np.uint64)
    for key in keys[:3]:
        h = (h ^ key) * _STRETCH
        h ^= h >> _FOLD
        h *= _SPREAD
        h ^= h >> _FOLD
    return np.argsort(h, kind="stable").astype(np.int64)


def _key_stream(seed: int, epoch: int, count: int) -> list[int]:
    state = derive_seed(seed, epoch)
    return [_mix((state + (turn + 1) * _GOLDEN) & _MASK) for turn in range(count)]


def _mix(x: int) -> int:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
