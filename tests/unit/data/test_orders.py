"""Orders of units: the same on every rank, equal to what the sampler yields, and padded or cut where shards differ."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from hasten.comm.base import Comm
from hasten.comm.local import LocalComm
from hasten.data.batch_plan import Shuffle
from hasten.data.order import (
    ComputedOrder,
    DistributedOrder,
    Fit,
    PartOrder,
    SampleOrder,
    SharedOrder,
    check_distributed,
    choose_fit,
    choose_order,
    to_plain_unit,
)
from hasten.data.position import Position
from hasten.errors import ConfigError, DataError, PeerFailedError
from tests.support.thread_group import ThreadComm, on_threads

START = Position(seed=5)
CHUNK = 1024
"""Number of units that the first rank shares at a time."""


class Drawn:
    """A sampler of some numbers that counts how far it was drawn, and may fail on the way."""

    def __init__(self, units: Iterable[Any], fails_at: int | None = None) -> None:
        self.units = list(units)
        self.fails_at = fails_at
        self.num_drawn = 0
        self.epoch: int | None = None

    def __iter__(self) -> Iterator[Any]:
        for index, unit in enumerate(self.units):
            if index == self.fails_at:
                raise KeyError("no more")
            self.num_drawn += 1
            yield unit

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Sized(Drawn):
    """The same with a length, which may be wrong."""

    def __init__(self, units: Iterable[Any], size: int | None = None) -> None:
        super().__init__(units)
        self.size = len(self.units) if size is None else size

    def __len__(self) -> int:
        return self.size


# -- computed ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 8193])
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_computed_order_is_drawn_as_it_is_sought(size: int, shuffled: bool) -> None:
    order = ComputedOrder(range(size), shuffled)
    position = Position(seed=5, epoch=3)
    positions = np.arange(size)
    expected = Shuffle(size, 5, 3).at(positions) if shuffled else positions
    assert list(order.draw(position)) == expected.tolist()
    assert order.seek(position)(positions).tolist() == expected.tolist()
    assert order.size() == size
    assert order.begin(position) is position


# -- shared --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2500])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_first_rank_draws_and_the_others_receive(num_ranks: int, size: int) -> None:
    def draw(comm: Comm) -> tuple[list[Any], Drawn, int]:
        sampler = Drawn(range(100, 100 + size))
        order = SharedOrder(sampler, comm)
        units = list(order.draw(replace(START, epoch=7)))
        return units, sampler, cast(ThreadComm, comm).num_collectives

    for rank, (units, sampler, num_shared) in enumerate(on_threads(draw, num_ranks)):
        assert units == list(range(100, 100 + size))
        assert sampler.num_drawn == (size if rank == 0 else 0)
        assert sampler.epoch == 7
        # a list that is not full ends the order
        assert num_shared == (size // CHUNK + 1 if num_ranks > 1 else 0)


@pytest.mark.parametrize("fails_at", [0, 5, CHUNK + 3])
def test_an_error_of_the_sampler_is_raised_on_every_rank(fails_at: int) -> None:
    def draw(comm: Comm) -> tuple[int, str]:
        order = SharedOrder(Drawn(range(2000), fails_at), comm)
        units: list[Any] = []
        with pytest.raises((KeyError, PeerFailedError)) as caught:
            units.extend(order.draw(START))
        return len(units), f"{caught.type.__name__} {caught.value}"

    assert on_threads(draw, 1)[0][1] == "KeyError 'no more'"
    first, second = on_threads(draw, 2, first_rank=4)
    assert first[0] == second[0] == fails_at // CHUNK * CHUNK
    assert first[1] == "KeyError 'no more'"
    assert second[1].startswith(
        "PeerFailedError the sampler raised KeyError('no more') on rank 4, "
    )


def test_random_draws_depend_on_seed_and_epoch_and_disturb_nothing() -> None:
    class Random(Drawn):
        def __iter__(self) -> Iterator[Any]:
            for _ in range(6):
                yield random.randrange(10**6) + int(torch.randint(10**6, (1,)))

    def draw(seed: int, epoch: int) -> list[int]:
        order = SharedOrder(Random(()), LocalComm())
        return list(order.draw(Position(seed=seed, epoch=epoch)))

    states = torch.get_rng_state(), random.getstate()
    assert draw(1, 2) == draw(1, 2)
    assert len({tuple(draw(seed, epoch)) for seed in (1, 2) for epoch in (1, 2)}) == 4
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_a_generator_of_the_sampler_is_stored_once_and_restored() -> None:
    def shuffled(seed: int) -> SharedOrder:
        generator = torch.Generator().manual_seed(seed)
        return SharedOrder(RandomSampler(range(20), generator=generator), LocalComm())

    order = shuffled(1)
    position = order.begin(START)
    assert position.generator is not None
    units = list(order.draw(position))
    assert order.begin(position) is position
    assert list(order.draw(position)) == units
    reseeded = shuffled(2)
    assert list(reseeded.draw(reseeded.begin(START))) != units
    assert list(reseeded.draw(reseeded.begin(position))) == units
    assert order.size() == 20
    assert SharedOrder(Drawn(()), LocalComm()).size() is None
    assert cast(SampleOrder, order).seek(position) is None


def test_the_start_of_an_order_is_checked_by_its_witness() -> None:
    order = SharedOrder(Drawn([4, 9, 2, 7]), LocalComm())
    assert list(order.draw(START)) == [4, 9, 2, 7]
    assert order.witness(0) is None
    witness = order.witness(2)
    assert witness == (2, zlib.crc32(b"[4, 9]"))
    assert order.witness(99) == (4, zlib.crc32(b"[4, 9, 2, 7]"))
    saved = replace(START, witness=witness)
    for units in ([4, 9, 2, 7], [4, 9, 3]):
        assert list(SharedOrder(Drawn(units), LocalComm()).draw(saved)) == units
    for units in ([4, 8, 2, 7], [4], [9, 4]):
        with pytest.raises(DataError, match="drew a different order for epoch 0"):
            list(SharedOrder(Drawn(units), LocalComm()).draw(saved))
    strange = SharedOrder(Drawn([object(), 2]), LocalComm())
    list(strange.draw(START))
    assert strange.witness(2) is None


def test_units_are_plain_numbers_and_texts() -> None:
    class Text(str):
        __slots__ = ()

        def __repr__(self) -> str:
            return "another"

    units = [np.int64(3), (1, torch.tensor(2)), [Text("a"), [True]]]
    assert repr(to_plain_unit(units)) == "[3, [1, 2], ['a', [1]]]"
    for wrong in (1.0, None, {1}):
        with pytest.raises(TypeError):
            to_plain_unit(wrong)


# -- shards --------------------------------------------------------------------------------------------------------
def part_order(
    comm: Comm, sizes: list[int | None], fit: Fit, computed: bool
) -> tuple[PartOrder, list[Any]]:
    """The order of a rank's shard, whose units are 1000 times the rank and up, and its units."""
    size = sizes[comm.rank] or 0
    units = list(range(1000 * comm.rank, 1000 * comm.rank + size))
    if computed:
        inner: Any = ComputedOrder(range(size), shuffled=False)
        units = list(range(size))
    else:
        inner = SharedOrder(Sized(units), LocalComm())
    return PartOrder(inner, comm, sizes, fit), units


def repeated(units: list[Any], num_units: int) -> list[Any]:
    """The units, then those at their start again and again, as far as they are remembered."""
    first_units = units[:CHUNK]
    num_missing = num_units - len(units)
    rounds = num_missing // max(len(first_units), 1) + 1
    return (units + (first_units * rounds)[: max(num_missing, 0)])[:num_units]


@pytest.mark.parametrize(
    "sizes", [[3, 5], [5, 3], [4, 4], [1, 7, 2], [1030, 3000], [0, 0]]
)
@pytest.mark.parametrize("fit", ["longest", "shortest", "own"])
def test_shards_of_different_size_end_together_or_alone(
    sizes: list[int | None], fit: Fit
) -> None:
    known_sizes = [size or 0 for size in sizes]
    num_units = max(known_sizes) if fit == "longest" else min(known_sizes)

    def draw(comm: Comm) -> None:
        order, units = part_order(comm, sizes, fit, computed=False)
        expected = units if fit == "own" else repeated(units, num_units)
        assert order.size() == len(expected)
        assert order.num_real() is None
        assert list(order.draw(START)) == expected
        # known once the shard was not enough
        assert order.num_real() == (len(units) if len(expected) > len(units) else None)
        assert order.part(3) == (3, None)
        computed_order, _ = part_order(comm, sizes, fit, computed=True)
        index_at = computed_order.seek(START)
        assert index_at is not None
        assert computed_order.num_real() == len(units)
        if units:
            positions = np.arange(3 * len(units))
            assert np.array_equal(index_at(positions), positions % len(units))
        assert computed_order.part(3) == (3, len(units))
        assert computed_order.begin(START) is START

    on_threads(draw, len(sizes))


def test_padding_is_told_from_the_shard_by_its_number_of_units() -> None:
    def draw(comm: Comm) -> list[int | None]:
        order, _ = part_order(comm, [3, 5], "longest", computed=False)
        drawn = order.draw(START)
        num_real = []
        for _ in islice(drawn, 5):
            num_real.append(order.num_real())
        return num_real

    assert on_threads(draw, 2) == [[None, None, None, 3, 3], [None] * 5]


def test_a_shard_is_alone_without_other_ranks() -> None:
    order = PartOrder(
        SharedOrder(Drawn(range(4)), LocalComm()), LocalComm(), [9], "longest"
    )
    assert order.size() is None
    assert list(order.draw(START)) == [0, 1, 2, 3]


def test_another_fit_has_the_same_shard() -> None:
    def draw(comm: Comm) -> list[int | None]:
        order, _ = part_order(comm, [3, 5], "longest", computed=False)
        fits: tuple[Fit, ...] = ("longest", "shortest", "own")
        return [order.fitted(fit).size() for fit in fits]

    assert on_threads(draw, 2) == [[5, 3, 3], [5, 3, 5]]


@pytest.mark.parametrize(
    ("sizes", "fit", "message"),
    [
        ([3, None], "longest", "has no length"),
        ([3, None], "shortest", "has no length"),
        ([0, 2, 0], "longest", r"rank\(s\) 4, 6 of 3 has no samples"),
    ],
)
def test_shards_that_cannot_end_together_are_refused(
    sizes: list[int | None], fit: Fit, message: str
) -> None:
    def size(comm: Comm) -> None:
        order, _ = part_order(comm, sizes, fit, computed=False)
        with pytest.raises(DataError, match=message):
            order.size()
        assert order.fitted("own").size() == (sizes[comm.rank] or 0)

    on_threads(size, len(sizes), first_rank=4)


def test_shards_without_samples_end_the_shortest_epoch_at_once() -> None:
    def size(comm: Comm) -> int | None:
        return part_order(comm, [0, 4], "shortest", computed=False)[0].size()

    assert on_threads(size, 2) == [0, 0]


def test_a_shard_that_changed_its_length_is_refused() -> None:
    def seek(comm: Comm) -> None:
        inner = ComputedOrder(range(4), shuffled=False)
        fits: tuple[Fit, ...] = ("longest", "shortest")
        for fit in fits:
            with pytest.raises(DataError, match="has 4 samples, and had 3 when"):
                PartOrder(inner, comm, [3, 3], fit).seek(START)
        assert PartOrder(inner, comm, [3, 3], "own").seek(START) is not None

    on_threads(seek, 2)


def test_a_sampler_that_yields_more_than_its_length_is_refused() -> None:
    def draw(comm: Comm) -> None:
        for fit, message in (("longest", "more indices than its length"), ("own", "")):
            sampler = Sized(range(5), size=4)
            order = PartOrder(
                SharedOrder(sampler, LocalComm()), comm, [4, 4], cast(Fit, fit)
            )
            if message:
                with pytest.raises(DataError, match=message):
                    list(order.draw(START))
            else:
                assert list(order.draw(START)) == [0, 1, 2, 3, 4]

    on_threads(draw, 2)


# -- choice --------------------------------------------------------------------------------------------------------
def test_the_end_of_shards() -> None:
    assert [
        choose_fit(even, drop_last)
        for even in (True, False)
        for drop_last in (True, False)
    ] == ["shortest", "longest", "own", "own"]


class Reordered(RandomSampler):
    """A sampler of the user, whose order only it knows."""


@pytest.mark.parametrize(
    ("sampler", "seekable", "shuffled"),
    [
        (SequentialSampler(range(9)), True, False),
        (SequentialSampler(range(9)), False, False),
        (RandomSampler(range(9)), True, True),
        (RandomSampler(range(9)), False, None),
        (RandomSampler(range(9), replacement=True), True, None),
        (RandomSampler(range(9), num_samples=4), True, None),
        (Reordered(range(9)), True, None),
        (WeightedRandomSampler([0.5, 0.5], 2), True, None),
        (BatchSampler(SequentialSampler(range(9)), 2, False), True, None),
        ([3, 1, 2], True, None),
    ],
)
def test_orders_are_computed_where_that_is_exact(
    sampler: Any, seekable: bool, shuffled: bool | None
) -> None:
    order = choose_order(sampler, seekable=seekable, comm=LocalComm())
    if shuffled is None:
        assert type(order) is SharedOrder
    else:
        assert type(order) is ComputedOrder
        assert order.shuffled is shuffled
        assert order.size() == 9


def test_a_distributed_sampler_has_split_the_samples_already() -> None:
    for size in range(1, 14):
        for num_replicas in range(1, 5):
            for rank in range(num_replicas):
                for drop_last in (False, True):
                    sampler: DistributedSampler[Any] = DistributedSampler(
                        range(size),  # type: ignore[arg-type] # a range is a dataset
                        num_replicas,
                        rank,
                        shuffle=False,
                        drop_last=drop_last,
                    )
                    order = choose_order(sampler, seekable=True, comm=LocalComm())
                    assert isinstance(order, DistributedOrder)
                    units = list(order.draw(replace(START, epoch=4)))
                    assert sampler.epoch == 4
                    assert order.size() == len(units)
                    num_real = len(range(rank, size, num_replicas))
                    assert order.num_real() == min(num_real, len(units))
                    assert cast(SampleOrder, order).seek(START) is None
                    assert order.begin(START) is START


def test_a_distributed_sampler_must_split_as_the_mesh_does() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(
        range(9),  # type: ignore[arg-type] # a range is a dataset
        num_replicas=2,
        rank=1,
    )
    check_distributed(sampler, 2, 1, dispatch=False)
    for num_shards, shard in ((2, 0), (3, 1), (1, 0)):
        with pytest.raises(DataError, match="num_replicas=2 and rank=1"):
            check_distributed(sampler, num_shards, shard, dispatch=False)
    with pytest.raises(ConfigError, match="dispatch_batches=True"):
        check_distributed(sampler, 2, 1, dispatch=True)
