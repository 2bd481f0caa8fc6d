"""Checksums of file chunks: XXH3, and the column sums of older checkpoints."""

from __future__ import annotations

import zlib
from typing import Final, Protocol

import numpy as np
import xxhash

_WORDS: Final = 1021  # in a row; a prime, so that nothing that is moved by sectors or pages stays in its columns
_ROWS: Final = 17  # odd, so that a bit stuck in a whole column does not add up to nothing
BLOCK_BYTES: Final = _ROWS * _WORDS * 8
"""Format 3 lays a chunk out in blocks of rows of 64-bit words."""
_COLUMN_DIGITS: Final = 8
Bytes = bytes | bytearray | memoryview


class Summing(Protocol):
    """A checksum in the making."""

    def update(self, piece: Bytes) -> None:
        """Add bytes, of any number. Long pieces are best: threads wait for each other between calls."""
        ...

    def digest(self) -> str:
        """The checksum as hex digits."""
        ...


class Checksum:
    """The 64-bit XXH3 of one chunk, fed piece by piece.

    It sees every kind of damage alike, at the speed of memory. Like a CRC it guards against damage, not against
    somebody who forges it.
    """

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def update(self, piece: Bytes) -> None:
        self._state.update(piece)

    def digest(self) -> str:
        """16 hex digits."""
        return self._state.hexdigest()


class ColumnChecksum:
    """The checksum of format 3, which is read and no longer written.

    In every block each column of words is added up; a CRC-32 over these sums, in order, is the checksum. A changed bit
    changes a column; bytes that are lost, shifted or trade places land in other columns or other blocks. Unseen stay
    changes that cancel out within one column of a block, as two words that trade places a multiple of 8168 bytes apart.
    """

    def __init__(self) -> None:
        self._crc = 0
        self._begun = b""  # of a block whose end has not come yet

    def update(self, piece: Bytes) -> None:
        """Add bytes, of any number. Long pieces are best: threads wait for each other between calls."""
        view = memoryview(piece).cast("B")
        if self._begun:
            missing = BLOCK_BYTES - len(self._begun)
            self._begun, view = self._begun + bytes(view[:missing]), view[missing:]
            if len(self._begun) < BLOCK_BYTES:
                return
            self._add(self._begun)
        whole = view.nbytes // BLOCK_BYTES * BLOCK_BYTES
        if whole:
            self._add(view[:whole])
        self._begun = bytes(view[whole:])

    def _add(self, blocks: Bytes) -> None:
        sums = np.add.reduce(np.frombuffer(blocks, np.uint64).reshape(-1, _ROWS, _WORDS), axis=1)
        self._crc = zlib.crc32(sums.data, self._crc)

    def digest(self) -> str:
        """8 hex digits; nothing can be added after it."""
        if self._begun:
            self.update(bytes(BLOCK_BYTES - len(self._begun)))
        return f"{self._crc:08x}"


def summing_like(known: str) -> type[Checksum | ColumnChecksum]:
    """The kind of checksum that `known` is one of, told by its length."""
    return ColumnChecksum if len(known) == _COLUMN_DIGITS else Checksum


def checksum(chunk: Bytes, kind: type[Checksum | ColumnChecksum] = Checksum) -> str:
    """The checksum of a chunk that lies in memory."""
    total: Summing = kind()
    total.update(chunk)
    return total.digest()
