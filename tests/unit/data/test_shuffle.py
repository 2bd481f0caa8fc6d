"""The seekable shuffle: a permutation at every size, uniform, stable, and small in memory."""

from __future__ import annotations

import tracemalloc
import zlib

import numpy as np
import pytest

from hasten.data.batch_plan import Shuffle, derive_seed


def test_every_size_up_to_2000_is_a_permutation() -> None:
    for size in (*range(2001), 4095, 4096, 4097, 8191, 8192, 8193, 100_000):
        order = Shuffle(size, seed=size, epoch=size % 7).at(np.arange(size))
        assert np.array_equal(np.sort(order), np.arange(size)), size


def test_any_part_is_the_same_part_of_the_whole() -> None:
    for size in (10, 4096, 4097, 5000):
        shuffle = Shuffle(size, seed=3, epoch=1)
        full_order = shuffle.at(np.arange(size))
        picked = np.array([size - 1, 0, size // 2, 3])
        assert np.array_equal(shuffle.at(picked), full_order[picked])


def test_seed_and_epoch_change_the_order_and_nothing_else_does() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return list(Shuffle(3000, seed, epoch).at(np.arange(3000)))

    assert order(1, 0) == order(1, 0)
    assert (
        len({tuple(order(seed, epoch)) for seed in range(4) for epoch in range(4)})
        == 16
    )


def test_the_order_is_frozen_because_saved_positions_mean_it() -> None:
    assert Shuffle(10, seed=0, epoch=0).at(np.arange(10)).tolist() == [
        3,
        0,
        7,
        6,
        8,
        5,
        1,
        9,
        2,
        4,
    ]
    assert Shuffle(10**10, seed=42, epoch=3).at(np.arange(3)).tolist() == [
        8779511725,
        6482454976,
        7686664977,
    ]


@pytest.mark.parametrize(
    ("size", "seed", "epoch", "checksum"),
    [
        (1, 0, 0, 1696784233),
        (10, 0, 0, 343921361),
        (1000, 7, 2, 660042047),
        # around the largest table, and around powers of two
        (4095, 1, 1, 2214416523),
        (4096, 1, 1, 2195380610),
        (4097, 1, 1, 1273462863),
        (4098, 1, 1, 1017458984),
        (8192, 1, 1, 3859182189),
        (8193, 1, 1, 412447209),
        (70_000, 3, 5, 3502737470),
        # two numbers have hashes with the same first half
        (4096, 1338, 0, 235216320),
        (4096, 2794, 0, 3875768794),
    ],
)
def test_whole_orders_are_frozen(
    size: int, seed: int, epoch: int, checksum: int
) -> None:
    order = Shuffle(size, seed, epoch).at(np.arange(size))
    assert order.dtype == np.int64
    assert zlib.crc32(order.tobytes()) == checksum


def test_shuffles_are_equal_if_their_numbers_are() -> None:
    assert Shuffle(10, 2, 3) == Shuffle(10, 2, 3)
    assert Shuffle(10, 2, 3) != Shuffle(10, 2, 4)
    assert repr(Shuffle(9999, 2, 3)) == "Shuffle(size=9999, seed=2, epoch=3)"


@pytest.mark.parametrize("size", [7, 100, 4096, 4097, 8191, 70_000])
def test_positions_are_uniform_over_epochs(size: int) -> None:
    epochs, num_positions, cells = 1000, min(size, 48), min(size, 8)
    drawn = (
        np.stack(
            [
                Shuffle(size, 11, epoch).at(np.arange(num_positions))
                for epoch in range(epochs)
            ]
        )
        * cells
        // size
    )
    expected = np.bincount(np.arange(size) * cells // size) * epochs / size
    counts = np.stack([np.bincount(column, minlength=cells) for column in drawn.T])
    chi = ((counts - expected) ** 2 / expected).sum(axis=1) / (cells - 1)
    # of the mean of so many chi-squares per degree of freedom
    spread = np.sqrt(2 / ((cells - 1) * num_positions))
    assert abs(chi.mean() - 1) < 4 * spread
    assert chi.max() < 5.0


@pytest.mark.parametrize("size", [6, 4096, 5000, 100_000])
def test_pairs_of_neighbours_are_uniform_over_epochs(size: int) -> None:
    epochs, num_positions = 1200, min(size, 33)
    drawn = np.stack(
        [
            Shuffle(size, 5, epoch).at(np.arange(num_positions))
            for epoch in range(epochs)
        ]
    )
    ups = (drawn[:, 1:] > drawn[:, :-1]).mean()
    assert abs(ups - 0.5) < 0.012
    cells = drawn * 2 // size
    same_cell_share = (cells[:, 1:] == cells[:, :-1]).mean()
    half = size // 2
    expected = (half * (half - 1) + (size - half) * (size - half - 1)) / (
        size * (size - 1)
    )
    assert abs(same_cell_share - expected) < 0.012
    following = (drawn[:, 1:] == drawn[:, :-1] + 1).mean() * size
    assert following < 1.0 + 4.0 / np.sqrt(drawn[:, 1:].size / size)


def test_two_epochs_have_nothing_in_common() -> None:
    size = 5000
    first, second = (Shuffle(size, 9, epoch).at(np.arange(size)) for epoch in (0, 1))
    assert (first == second).sum() < 8  # one fixed match is expected
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.08


def test_ten_billion_samples_need_a_few_kilobytes() -> None:
    tracemalloc.start()
    try:
        shuffle = Shuffle(10_000_000_000, seed=1, epoch=0)
        order = shuffle.at(np.arange(9_999_999_968, 10_000_000_000))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(set(order.tolist())) == 32
    assert order.min() >= 0
    assert order.max() < 10_000_000_000
    assert peak < 16_384


def test_derived_seeds_differ_in_every_part() -> None:
    seeds = {
        derive_seed(seed, epoch, shard)
        for seed in range(5)
        for epoch in range(5)
        for shard in range(5)
    }
    assert len(seeds) == 125
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert derive_seed(-1) != derive_seed(1)
