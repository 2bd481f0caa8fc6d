"""Batches of indices: drawn as they would be computed, on all ranks together, and as a model of lists tells."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from hasten.comm.base import Comm
from hasten.comm.local import LocalComm
from hasten.config.sections.loop import DataLoaderConfiguration, Pad
from hasten.data.batch_plan import DataRanks, plan_batches, plan_rows
from hasten.data.order import ComputedOrder, Fit, PartOrder, SampleOrder, SharedOrder
from hasten.data.position import Position
from hasten.data.sampler import Assignment, IndexBatch, assign_indices
from hasten.errors import ConfigError, DataError
from tests.support.loaders import context_of
from tests.support.thread_group import on_threads

START = Position(seed=5)


@dataclass
class Counted:
    """An order that is drawn one unit at a time, and counts them."""

    units: list[Any]
    num_drawn: int = field(default=0)

    def size(self) -> int | None:
        return None

    def begin(self, position: Position) -> Position:
        return position

    def seek(self, position: Position) -> None:
        return None

    def draw(self, position: Position) -> Iterator[Any]:
        for unit in self.units:
            self.num_drawn += 1
            yield unit


def ranks_of(
    make_order: Callable[[], SampleOrder], world: int, batch: int, **settings: Any
) -> list[Assignment]:
    """The assignments of all ranks for a loader of fixed batch size."""
    return [
        Assignment(
            make_order(),
            plan_rows(
                batch_size=batch, num_shards=world, shard=shard, split=False, **settings
            ),
            "rows",
        )
        for shard in range(world)
    ]


def rounds_of(rank: Assignment, position: Position) -> list[list[IndexBatch | None]]:
    """The batches of all ranks step by step; a dropped end may be a step without any."""
    rounds = list(rank.rounds(position))
    if rounds and not any(rounds[-1]):
        rounds.pop()
    return rounds


def unmarked(batches: list[IndexBatch]) -> list[IndexBatch]:
    return [(indices, num_real, False) for indices, num_real, _ in batches]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("pad", ["least", "full"])
def test_batches_are_drawn_as_they_are_computed(world: int, pad: Pad) -> None:
    for size, batch, drop_last, even in itertools.product(
        range(11), (1, 2, 3), (False, True), (False, True)
    ):
        settings = {"drop_last": drop_last, "even": even, "pad": pad}
        computed = ranks_of(
            lambda size=size: ComputedOrder(range(size), shuffled=False),  # type: ignore[misc]
            world,
            batch,
            **settings,
        )
        drawn = ranks_of(
            lambda size=size: Counted(list(range(size))),  # type: ignore[misc]
            world,
            batch,
            **settings,
        )
        for consumed in {0, 1, batch * world, size // 2, size}:
            position = replace(START, consumed=min(consumed, size))
            batches = [list(rank.index_batches(position)) for rank in computed]
            assert [list(rank.index_batches(position)) for rank in drawn] == batches
            rounds = [list(step) for step in itertools.zip_longest(*batches)]
            assert rounds_of(computed[0], position) == rounds
            assert rounds_of(drawn[0], position) == rounds
            for rank, other, own_batches in zip(computed, drawn, batches, strict=True):
                flags = [is_last for _, _, is_last in own_batches]
                assert flags == [False] * (len(flags) - 1) + [True] * bool(flags)
                blind = list(other.index_batches(position, looks_ahead=False))
                assert blind == unmarked(own_batches)
                for step, (indices, num_real, _) in enumerate(own_batches):
                    assert rank.batch_of(position, step) == indices[:num_real]
                assert other.batch_of(position, 0) is None
                if not position.consumed:
                    assert (rank.steps(), other.steps()) == (len(own_batches), None)
            real_units = [
                unit
                for step in rounds
                for index_batch in step
                if index_batch is not None
                for unit in index_batch[0][: index_batch[1]]
            ]
            num_left = size - position.consumed
            if drop_last:
                num_left -= num_left % (batch * world)
            start = position.consumed
            assert real_units == list(range(start, start + num_left))


def test_batches_of_an_order_that_is_drawn_are_unknown_beforehand() -> None:
    (rank,) = ranks_of(
        lambda: SharedOrder(range(4), LocalComm()), 1, 2, drop_last=False, even=True
    )
    assert rank.steps() == 2
    assert rank.batch_of(START, 0) is None


def test_units_are_drawn_when_they_are_needed() -> None:
    for world, batch, pad in itertools.product((1, 2), (1, 3), ("least", "full")):
        for looks_ahead in (False, True):
            order = Counted(list(range(20)))
            (rank, *_) = ranks_of(
                lambda order=order: order,  # type: ignore[misc]
                world,
                batch,
                drop_last=False,
                even=True,
                pad=pad,
            )
            step = batch * world
            padding = step if pad == "full" else world
            assert rank.steps() is None
            for number, _ in enumerate(rank.index_batches(START, looks_ahead), 1):
                num_needed = step * (number + looks_ahead)
                assert order.num_drawn == min(max(num_needed, padding), 20)


# -- batches of the user -------------------------------------------------------------------------------------------
def batches_of(size: int, rows: int) -> list[list[int]]:
    return [
        list(range(start, min(start + rows, size))) for start in range(0, size, rows)
    ]


def expected_batches(
    batches: list[list[int]],
    world: int,
    shard: int,
    even: bool,
    drop_last: bool,
    fill: int | None,
) -> list[IndexBatch]:
    """What a rank reads, told with lists alone."""
    blocks = [batches[start : start + world] for start in range(0, len(batches), world)]
    expected: list[IndexBatch] = []
    for block in blocks:
        is_short = len(block) < world
        needs_rows = fill is not None and (is_short or len(block[-1]) < fill)
        if needs_rows and even and not drop_last and block is blocks[-1]:
            assert fill is not None
            rows = [row for batch in block for row in batch]
            first_rows = [row for batch in batches[:world] for row in batch]
            padded_rows = rows + first_rows * (1 + world * fill)
            num_real = min(max(len(rows) - shard * fill, 0), fill)
            expected.append(
                (
                    padded_rows[shard * fill : (shard + 1) * fill],
                    None if num_real == fill else num_real,
                    False,
                )
            )
        elif is_short and drop_last:
            continue
        elif shard < len(block):
            expected.append((block[shard], None, False))
        elif even:
            pads = batches[:world] * world
            expected.append((pads[shard - len(block)], 0, False))
    if expected:
        expected[-1] = (*expected[-1][:2], True)
    return expected


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("fill", [None, 2, 3])
@pytest.mark.parametrize("looks_ahead", [True, False])
def test_batches_of_the_user_are_dealt_round(
    world: int, fill: int | None, looks_ahead: bool
) -> None:
    for size, drop_last, even in itertools.product(
        range(20), (False, True), (False, True)
    ):
        batches = batches_of(size, fill or 2)
        ranks = [
            Assignment(
                SharedOrder(batches, LocalComm()),
                plan_batches(
                    num_shards=world,
                    shard=shard,
                    split=False,
                    drop_last=drop_last,
                    even=even,
                ),
                "batches",
                fill=fill,
            )
            for shard in range(world)
        ]
        assert ranks[0].unit == "batches"
        expected = [
            expected_batches(batches, world, shard, even, drop_last, fill)
            for shard in range(world)
        ]
        drawn = [list(rank.index_batches(START, looks_ahead)) for rank in ranks]
        if looks_ahead:
            assert drawn == expected, (size, drop_last, even)
            assert rounds_of(ranks[0], START) == [
                list(step) for step in itertools.zip_longest(*expected)
            ]
        else:
            assert list(map(unmarked, drawn)) == list(map(unmarked, expected))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("fill", [None, 4])
@pytest.mark.parametrize("even", [True, False])
def test_batches_of_the_user_are_split_over_ranks(
    world: int, fill: int | None, even: bool
) -> None:
    for size in range(12):
        batches = batches_of(size, 4)
        if not even and fill is None and batches and len(batches[-1]) < world:
            continue
        ranks = [
            Assignment(
                SharedOrder(batches, LocalComm()),
                plan_batches(
                    num_shards=world,
                    shard=shard,
                    split=True,
                    drop_last=False,
                    even=even,
                ),
                "batches",
                split=(world, shard),
                fill=fill,
            )
            for shard in range(world)
        ]
        shares = [list(rank.index_batches(START)) for rank in ranks]
        rounds = list(ranks[0].rounds(START))
        for number, batch in enumerate(batches):
            step = rounds[number]
            rows = [
                row
                for share in step
                if share is not None
                for row in share[0][: share[1]]
            ]
            assert rows == batch, "each row once, in order"
            if even:
                num_rows = -(-(fill or len(batch)) // world)
                assert [share and len(share[0]) for share in step] == [num_rows] * world
                padded = [row for share in step if share for row in share[0]]
                # from the start of the epoch up to a full batch, then of the batch
                filled = (batch + batches[0] * 4)[: fill or len(batch)]
                assert padded == [
                    filled[index % len(filled)] for index in range(world * num_rows)
                ]
            is_last = number == len(batches) - 1
            assert {share[2] for share in step if share} == {is_last}
        for shard, own_shares in enumerate(shares):
            assert own_shares == [step[shard] for step in rounds if step[shard]]


@pytest.mark.parametrize("batch", [[0], [0, 1]])
def test_a_batch_with_too_few_rows_is_refused_on_every_rank(batch: list[int]) -> None:
    plan = plan_batches(num_shards=3, shard=0, split=True, drop_last=False, even=False)
    for share in range(3):
        order = SharedOrder([batch], LocalComm())
        rank = Assignment(order, plan, "batches", split=(3, share))
        with pytest.raises(DataError, match="cannot be split over 3 data-parallel"):
            list(rank.index_batches(START))


# -- shards --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("computed", [True, False])
@pytest.mark.parametrize("fit", ["longest", "shortest", "own"])
@pytest.mark.parametrize("sizes", [[3, 7], [4, 4], [5, 2, 8]])
def test_units_past_the_end_of_a_shard_are_padding(
    computed: bool, fit: Fit, sizes: list[int | None]
) -> None:
    num_units = {"longest": max, "shortest": min}

    def check(comm: Comm) -> None:
        size = sizes[comm.rank] or 0
        for rows in (1, 2, 3):
            inner: SampleOrder = SharedOrder(range(size), LocalComm())
            if computed:
                inner = ComputedOrder(range(size), shuffled=False)
            plan = plan_rows(
                batch_size=rows,
                num_shards=1,
                shard=0,
                split=False,
                drop_last=False,
                even=True,
            )
            order = PartOrder(inner, comm, sizes, fit)
            rank = Assignment(order, plan, "rows", stride=len(sizes))
            known_sizes = [size or 0 for size in sizes]
            length = size if fit == "own" else num_units[fit](known_sizes)
            batches = list(rank.index_batches(START))
            units = [unit for indices, _, _ in batches for unit in indices]
            assert units == [index % size for index in range(length)]
            real_units = [
                unit for indices, num_real, _ in batches for unit in indices[:num_real]
            ]
            assert real_units == list(range(min(size, length)))
            assert rank.part == (len(sizes), size if computed else None)
            assert rank.evened(None) is rank
            own = rank.evened(False)
            assert (own.order.size(), own.plan.even) == (size, False)
            if computed:
                for step, (indices, num_real, _) in enumerate(batches):
                    assert rank.batch_of(START, step) == indices[:num_real]

    on_threads(check, len(sizes))


def test_a_short_end_of_a_shard_that_is_over_is_filled_and_all_padding() -> None:
    def check(comm: Comm) -> list[IndexBatch]:
        batches = [[[0]], [[0, 1], [2, 3], [4]]][comm.rank]
        plan = plan_batches(
            num_shards=1, shard=0, split=False, drop_last=False, even=True
        )
        order = PartOrder(SharedOrder(batches, LocalComm()), comm, [1, 3], "longest")
        rank = Assignment(order, plan, "batches", stride=2, fill=2)
        return list(rank.index_batches(START))

    assert on_threads(check, 2) == [
        [([0], None, False), ([0], 0, False), ([0, 0], 0, True)],
        [([0, 1], None, False), ([2, 3], None, False), ([4, 0], 1, True)],
    ]


def test_a_position_belongs_to_one_kind_of_shard() -> None:
    plan = plan_rows(
        batch_size=1, num_shards=1, shard=0, split=False, drop_last=False, even=True
    )
    whole = Assignment(ComputedOrder(range(9), False), plan, "rows")
    assert (whole.part, whole.stride, whole.unit) == (None, 1, "samples")
    inner = ComputedOrder(range(9), shuffled=False)
    shard = Assignment(
        PartOrder(inner, LocalComm(), [9], "own"), plan, "rows", stride=2
    )
    assert whole.evened(False).plan.even is False

    def refused(rank: Assignment, message: str, **fields: Any) -> None:
        with pytest.raises(DataError, match=message):
            rank.index_batches(replace(START, **fields))

    refused(
        whole,
        "of one of 2 parts, and this rank reads the whole",
        consumed=2,
        part=(2, 9),
    )
    refused(shard, "of the whole data, and this rank reads one of 2", consumed=2)
    refused(whole, "on 2 data-parallel processes, with", consumed=2, part=(2, 9))
    refused(shard, "on the data of the saved run", consumed=2)
    refused(shard, "of one of 3 parts, and this rank", consumed=2, part=(3, 9))
    refused(
        shard, "with 8 samples, and this rank's part has 9", consumed=2, part=(2, 8)
    )
    refused(shard, "3 samples is not a multiple of the 2", consumed=3, part=(2, 9))
    batches = list(shard.index_batches(replace(START, consumed=6, part=(2, 9))))
    assert [indices for indices, _, _ in batches] == [[3], [4], [5], [6], [7], [8]]
    # at the start of an epoch there is nothing to lose
    assert len(list(whole.index_batches(replace(START, part=(2, 9))))) == 9


# -- from loaders --------------------------------------------------------------------------------------------------
DATA: Any = list(range(9))


class Drawing(BatchSampler):
    """A batch sampler of the user, with a length."""


def assign(loader: DataLoader[Any], world: int = 2, **settings: Any) -> Assignment:
    config = DataLoaderConfiguration(**settings)
    ranks = DataRanks(1 if world > 1 else 0, world, tuple(range(world)))
    return assign_indices(loader, context_of(world - 1, world), config, ranks)


def test_loaders_are_assigned_by_their_batches() -> None:
    plain = assign(DataLoader(DATA, batch_size=2, drop_last=True))
    assert (plain.form, plain.plan.global_batch, plain.plan.drop_last) == (
        "rows",
        4,
        True,
    )
    assert (plain.split, plain.fill, plain.stride) == (None, None, 1)
    split = assign(DataLoader(DATA, batch_size=2), split_batches=True)
    assert split.plan.global_batch == 2
    items = assign(DataLoader(DATA, batch_size=None))
    assert (items.form, items.unit, items.split) == ("items", "samples", None)
    assert [unit for unit, _, _ in items.index_batches(START)] == [1, 3, 5, 7, 0]
    assert assign(DataLoader(DATA, batch_size=None), split_batches=True).split is None
    sampler = Drawing(SequentialSampler(DATA), 2, drop_last=True)
    own = assign(DataLoader(DATA, batch_sampler=sampler))
    assert (own.form, own.plan.drop_last, own.fill) == ("batches", True, None)
    shares = assign(DataLoader(DATA, batch_sampler=sampler), split_batches=True)
    assert (shares.split, shares.plan.num_shards) == ((2, 1), 1)
    filled = assign(DataLoader(DATA, batch_sampler=sampler), pad="full")
    assert filled.fill == 2
    with pytest.raises(ConfigError, match="batch_size=None: the dataset's items"):
        assign(DataLoader(DATA, batch_size=None), pad="full")
    unknown: Any = [[0, 1], [2]]
    with pytest.raises(ConfigError, match="list, a batch sampler without batch_size"):
        assign(DataLoader(DATA, batch_sampler=unknown), pad="full")
    assert assign(DataLoader(DATA, batch_sampler=unknown)).plan.drop_last is False


def test_data_that_is_sharded_already_has_an_order_for_each_rank() -> None:
    def sharded(comm: Comm) -> None:
        ctx = replace(context_of(comm.rank, 2), world=comm, groups=lambda *axes: comm)
        ranks = DataRanks(comm.rank, 2, (0, 1))
        data: Any = list(range(3 + comm.rank))
        for even_batches, drop_last, size in (
            (True, False, 4),
            (False, False, 3 + comm.rank),
            (True, True, 3),
        ):
            config = DataLoaderConfiguration(even_batches=even_batches)
            loader = DataLoader(data, batch_size=2, drop_last=drop_last)
            rank = assign_indices(loader, ctx, config, ranks, sharded=True)
            assert (rank.stride, rank.plan.num_shards, rank.plan.rows) == (2, 1, 2)
            assert rank.order.size() == size
            assert rank.part == (2, 3 + comm.rank)
        # drawn by each rank, not by the first one for all
        sampler = Drawing(SequentialSampler(data), 2, drop_last=False)
        loader = DataLoader(data, batch_sampler=sampler)
        rank = assign_indices(loader, ctx, DataLoaderConfiguration(), ranks, True)
        batches = [indices for indices, _, _ in rank.index_batches(START)]
        assert batches == batches_of(3 + comm.rank, 2)
        assert (rank.stride, rank.split) == (2, None)

    on_threads(sharded, 2)
