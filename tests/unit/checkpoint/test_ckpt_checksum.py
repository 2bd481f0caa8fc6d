"""The checksum of a chunk changes with every kind of damage and does not depend on how the chunk was fed."""

from __future__ import annotations

import random

import numpy as np

from hasten.checkpoint.checksum import ROW_BYTES, Checksum, checksum

SIZES = (1, 7, 8, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 1, 3 * ROW_BYTES + 5, 600 * ROW_BYTES + 1)


def chunk(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def test_every_flipped_bit_is_seen() -> None:
    for size in SIZES[:-1]:
        data = bytearray(chunk(size))
        sound = checksum(data)
        for at in range(0, size, 1 if size < 100 else 211):
            for bit in range(8):
                data[at] ^= 1 << bit
                assert checksum(data) != sound, f"size {size}: bit {bit} of byte {at}"
                data[at] ^= 1 << bit
        assert checksum(data) == sound


def test_feeding_in_pieces_is_the_same() -> None:
    for size in SIZES:
        data = chunk(size)
        for rows in (1, 2, 5):
            total = Checksum()
            for start in range(0, size, rows * ROW_BYTES):
                total.update(data[start : start + rows * ROW_BYTES])
            assert total.digest() == checksum(data)


def test_feeding_at_any_boundary_is_the_same() -> None:
    pick = random.Random(1)
    for size in (*SIZES, 20 * ROW_BYTES + 13):
        data, total, at = chunk(size), Checksum(), 0
        while at < size:
            length = pick.choice((0, 1, 4, 100, ROW_BYTES - 1, ROW_BYTES, 2 * ROW_BYTES + 7, 9 * ROW_BYTES))
            total.update(memoryview(data)[at : at + length])
            at += length
        assert total.digest() == checksum(data), f"size {size}"


def test_traded_words_and_blocks_are_seen() -> None:
    words = np.frombuffer(chunk(16 * ROW_BYTES), np.uint64).copy()
    sound = checksum(words.tobytes())
    blocks = words.reshape(16, -1)
    pick = random.Random(0)
    for _ in range(200):
        i, j = pick.sample(range(words.size), 2)
        traded = words.copy()
        traded[[i, j]] = traded[[j, i]]
        assert checksum(traded.tobytes()) != sound, f"words {i} and {j}"
    for i in range(15):
        traded = blocks.copy()
        traded[[i, i + 1]] = traded[[i + 1, i]]
        assert checksum(traded.tobytes()) != sound, f"blocks {i} and {i + 1}"


def test_lost_and_shifted_bytes_are_seen() -> None:
    data = chunk(5 * ROW_BYTES)
    sound = checksum(data)
    for at in (0, 1, 8, ROW_BYTES, 3 * ROW_BYTES):
        assert checksum(data[:at] + data[at + 1 :] + b"\0") != sound
        assert checksum(data[:at] + bytes(ROW_BYTES) + data[at + ROW_BYTES :]) != sound
    assert checksum(bytes(len(data))) != sound
