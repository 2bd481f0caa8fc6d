"""The checksum of a chunk changes with every kind of damage; files are verified by it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from hasten.checkpoint.format.manifest import (
    CHUNK_BYTES,
    FORMAT_VERSION,
    FileRecord,
    Manifest,
    checksum,
    decode_manifest,
    encode_manifest,
)
from hasten.checkpoint.reader import verify_files
from hasten.errors import CheckpointVersionError

BLOCK_BYTES = 17 * 1021 * 8
"""A size that is no multiple of a page or sector."""
SIZES = (
    1,
    7,
    8,
    BLOCK_BYTES - 1,
    BLOCK_BYTES,
    BLOCK_BYTES + 1,
    3 * BLOCK_BYTES + 5,
    40 * BLOCK_BYTES + 1,
)


def random_bytes(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def test_every_flipped_bit_is_seen() -> None:
    for size in SIZES[:-1]:
        data = bytearray(random_bytes(size))
        sound = checksum(data)
        for byte_index in range(0, size, 1 if size < 100 else 1 + size // 100):
            for bit in range(8):
                data[byte_index] ^= 1 << bit
                assert checksum(data) != sound, (
                    f"size {size}: bit {bit} of byte {byte_index}"
                )
                data[byte_index] ^= 1 << bit
        assert checksum(data) == sound


def test_traded_words_are_seen() -> None:
    words = np.frombuffer(random_bytes(4 * BLOCK_BYTES), np.uint64).copy()
    sound = checksum(words.tobytes())
    pick = random.Random(0)
    for _ in range(300):
        i, j = pick.sample(range(words.size), 2)
        traded = words.copy()
        traded[[i, j]] = traded[[j, i]]
        assert checksum(traded.tobytes()) != sound, f"words {i} and {j}"


def test_traded_sectors_and_pages_are_seen() -> None:
    data = np.frombuffer(random_bytes(2 * 1024**2), np.uint8)
    sound = checksum(data.tobytes())
    pick = random.Random(2)
    for unit in (16, 64, 512, 4096, 65536):
        units = data.reshape(-1, unit)
        close_pairs = [
            (i, i + step)
            for step in range(1, 40)
            for i in (0, 7)
            if i + step < len(units)
        ]
        for i, j in close_pairs + [
            tuple(pick.sample(range(len(units)), 2)) for _ in range(40)
        ]:
            traded = units.copy()
            traded[[i, j]] = traded[[j, i]]
            assert checksum(traded.tobytes()) != sound, (
                f"units of {unit} bytes, {i} and {j}"
            )


def test_lost_and_shifted_bytes_are_seen() -> None:
    data = random_bytes(5 * BLOCK_BYTES)
    sound = checksum(data)
    for offset in (0, 1, 8, 4096, BLOCK_BYTES, 3 * BLOCK_BYTES):
        assert checksum(data[:offset] + data[offset + 1 :] + b"\0") != sound
        for lost in (512, 4096, BLOCK_BYTES):
            assert (
                checksum(data[:offset] + bytes(lost) + data[offset + lost :]) != sound
            )
            assert (
                checksum(
                    data[:offset]
                    + data[offset + lost : offset + 2 * lost]
                    + data[offset + lost :]
                )
                != sound
            )
    assert checksum(bytes(len(data))) != sound


def test_stuck_bits_and_turned_signs_are_seen() -> None:
    zeros = np.zeros(4 * BLOCK_BYTES // 8, np.uint64)
    sound = checksum(zeros.tobytes())
    for bit in range(64):
        assert checksum((zeros + np.uint64(1 << bit)).tobytes()) != sound, (
            f"bit {bit} stuck"
        )
    numbers = np.random.default_rng(0).standard_normal(len(zeros))
    assert checksum((-numbers).tobytes()) != checksum(numbers.tobytes())


def test_words_that_trade_places_within_a_column_are_seen() -> None:
    words = np.frombuffer(random_bytes(2 * BLOCK_BYTES), np.uint64).copy()
    sound = checksum(words.tobytes())
    for row in range(1, 17):
        traded = words.copy()
        traded[[5, 5 + 1021 * row]] = traded[[5 + 1021 * row, 5]]
        assert checksum(traded.tobytes()) != sound


@pytest.mark.parametrize("size", [1, 4096, 2 * CHUNK_BYTES + 5])
def test_files_are_verified_by_it(size: int, tmp_path: Path) -> None:
    data = bytearray(random_bytes(size))
    path = tmp_path / "file.bin"
    path.write_bytes(data)
    chunk_sums = [
        checksum(data[start : start + CHUNK_BYTES])
        for start in range(0, size, CHUNK_BYTES)
    ]
    record = FileRecord(name="file.bin", size=size, sums=tuple(chunk_sums))
    assert verify_files(tmp_path, [record]) == []
    data[size // 2] ^= 1
    path.write_bytes(data)
    assert len(verify_files(tmp_path, [record])) == 1


def test_other_formats_are_refused() -> None:
    assert (
        decode_manifest(encode_manifest(Manifest()), "here").version == FORMAT_VERSION
    )
    for version in (FORMAT_VERSION - 1, FORMAT_VERSION + 1):
        with pytest.raises(
            CheckpointVersionError,
            match=rf"format {version} by .* reads format {FORMAT_VERSION}",
        ):
            decode_manifest(encode_manifest(Manifest(version=version)), "here")
