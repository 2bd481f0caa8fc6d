"""The checksum of a chunk changes with every kind of damage and does not depend on how the chunk was fed; both kinds are read."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hasten.checkpoint.format import manifest as sums
from hasten.checkpoint.format.manifest import (
    BLOCK_BYTES,
    FORMAT_VERSION,
    Checksum,
    ColumnChecksum,
    FileRecord,
    Manifest,
    decode,
    encode,
    summing_like,
)
from hasten.checkpoint.reader import verify_files
from hasten.errors import CheckpointVersionError

Sum = Callable[[bytes | bytearray], str]
Kind = type[Checksum | ColumnChecksum]
KINDS = (Checksum, ColumnChecksum)
kinds = pytest.mark.parametrize("kind", KINDS)
SIZES = (1, 7, 8, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 5, 40 * BLOCK_BYTES + 1)


def chunk(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@kinds
def test_every_flipped_bit_is_seen(kind: Kind) -> None:
    checksum: Sum = partial(sums.checksum, kind=kind)
    for size in SIZES[:-1]:
        data = bytearray(chunk(size))
        sound = checksum(data)
        for at in range(0, size, 1 if size < 100 else 1 + size // 100):
            for bit in range(8):
                data[at] ^= 1 << bit
                assert checksum(data) != sound, f"size {size}: bit {bit} of byte {at}"
                data[at] ^= 1 << bit
        assert checksum(data) == sound


@kinds
def test_feeding_at_any_boundary_is_the_same(kind: Kind) -> None:
    checksum: Sum = partial(sums.checksum, kind=kind)
    pick = random.Random(1)
    lengths = (0, 1, 4, 100, 4096, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 7, 9 * BLOCK_BYTES)
    for size in SIZES:
        for length in (*lengths[4:], None):
            data, total, at = chunk(size), kind(), 0
            while at < size:
                taken = pick.choice(lengths) if length is None else length
                total.update(memoryview(data)[at : at + taken])
                at += taken
            assert total.digest() == checksum(data), f"size {size}, pieces of {length or 'any size'}"


@kinds
def test_traded_words_are_seen(kind: Kind) -> None:
    checksum: Sum = partial(sums.checksum, kind=kind)
    words = np.frombuffer(chunk(4 * BLOCK_BYTES), np.uint64).copy()
    sound, row, block = checksum(words.tobytes()), 1021, BLOCK_BYTES // 8
    pick = random.Random(0)
    for _ in range(300):
        i, j = pick.sample(range(words.size), 2)
        traded = words.copy()
        traded[[i, j]] = traded[[j, i]]
        unseen = kind is ColumnChecksum and i % row == j % row and i // block == j // block  # as its docstring says
        assert unseen or checksum(traded.tobytes()) != sound, f"words {i} and {j}"


@kinds
def test_traded_sectors_and_pages_are_seen(kind: Kind) -> None:
    checksum: Sum = partial(sums.checksum, kind=kind)
    data = np.frombuffer(chunk(2 * 1024**2), np.uint8)
    sound = checksum(data.tobytes())
    pick = random.Random(2)
    for unit in (16, 64, 512, 4096, 65536):
        parts = data.reshape(-1, unit)
        near = [(i, i + step) for step in range(1, 40) for i in (0, 7) if i + step < len(parts)]
        for i, j in near + [tuple(pick.sample(range(len(parts)), 2)) for _ in range(40)]:
            traded = parts.copy()
            traded[[i, j]] = traded[[j, i]]
            assert checksum(traded.tobytes()) != sound, f"units of {unit} bytes, {i} and {j}"


@kinds
def test_lost_and_shifted_bytes_are_seen(kind: Kind) -> None:
    checksum: Sum = partial(sums.checksum, kind=kind)
    data = chunk(5 * BLOCK_BYTES)
    sound = checksum(data)
    for at in (0, 1, 8, 4096, BLOCK_BYTES, 3 * BLOCK_BYTES):
        assert checksum(data[:at] + data[at + 1 :] + b"\0") != sound
        for lost in (512, 4096, BLOCK_BYTES):
            assert checksum(data[:at] + bytes(lost) + data[at + lost :]) != sound
            assert checksum(data[:at] + data[at + lost : at + 2 * lost] + data[at + lost :]) != sound
    assert checksum(bytes(len(data))) != sound


@kinds
def test_stuck_bits_and_turned_signs_are_seen(kind: Kind) -> None:
    checksum: Sum = partial(sums.checksum, kind=kind)
    zeros = np.zeros(4 * BLOCK_BYTES // 8, np.uint64)
    sound = checksum(zeros.tobytes())
    for bit in range(64):
        assert checksum((zeros + np.uint64(1 << bit)).tobytes()) != sound, f"bit {bit} stuck"
    numbers = np.random.default_rng(0).standard_normal(len(zeros))
    assert checksum((-numbers).tobytes()) != checksum(numbers.tobytes())


def test_words_that_trade_places_anywhere_are_seen_by_the_checksum_that_is_written() -> None:
    words = np.frombuffer(chunk(2 * BLOCK_BYTES), np.uint64).copy()
    sound = sums.checksum(words.tobytes())
    for row in range(1, 17):  # what column sums cannot see
        traded = words.copy()
        traded[[5, 5 + 1021 * row]] = traded[[5 + 1021 * row, 5]]
        assert sums.checksum(traded.tobytes()) != sound
        assert sums.checksum(traded.tobytes(), ColumnChecksum) == sums.checksum(words.tobytes(), ColumnChecksum)


@kinds
@pytest.mark.parametrize("size", [1, 4096, 3 * 1024**2 + 5])
def test_files_with_either_checksum_are_verified(kind: Kind, size: int, tmp_path: Path) -> None:
    chunk_bytes = 1024**2
    data = bytearray(chunk(size))
    path = tmp_path / "file.bin"
    path.write_bytes(data)
    found = [sums.checksum(data[start : start + chunk_bytes], kind) for start in range(0, size, chunk_bytes)]
    assert all(summing_like(one) is kind for one in found)
    record = FileRecord(name="file.bin", size=size, sums=tuple(found))
    assert verify_files(tmp_path, [record], chunk_bytes) == []
    data[size // 2] ^= 1
    path.write_bytes(data)
    assert len(verify_files(tmp_path, [record], chunk_bytes)) == 1


def test_the_format_before_is_read_and_others_are_refused() -> None:
    assert Manifest().version == FORMAT_VERSION == 4
    for version in (3, 4):
        assert decode(encode(Manifest(version=version)), "here").version == version
    for version in (2, 5):
        with pytest.raises(CheckpointVersionError, match=rf"format {version}; .* reads formats 3 and 4"):
            decode(encode(Manifest(version=version)), "here")
