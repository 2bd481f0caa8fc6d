"""Laws of the plans: every unit exactly once, padding last, equal steps, at every size, batch and world."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest

from hasten.data.batch_plan import (
    SINGLE_RANK,
    DataRanks,
    LoaderPlan,
    plan_batches,
    plan_rows,
    split_units,
)
from hasten.errors import ConfigError


def plans_of_ranks(
    batch: int, world: int, *, split: bool, drop_last: bool, even: bool
) -> list[LoaderPlan]:
    return [
        plan_rows(
            batch_size=batch,
            num_shards=world,
            shard=shard,
            split=split,
            drop_last=drop_last,
            even=even,
        )
        for shard in range(world)
    ]


def read_rows(plan: LoaderPlan, size: int, start: int = 0) -> list[list[int]]:
    return [
        row
        for chunk in plan.assign(size, start, chunk_size=16)
        for row in chunk.tolist()
    ]


def check_law(size: int, rank_plans: list[LoaderPlan]) -> None:
    """Each unit exactly once and in order, padding last and as documented, equal steps where promised."""
    plan, world = rank_plans[0], len(rank_plans)
    steps = [plan.steps(size) for plan in rank_plans]
    full, left = divmod(size, plan.global_batch)
    order: list[int] = []
    real = 0
    # full steps do not know the size: what holds at 25 holds in between
    if full and size % 25 == 0:
        full_steps = np.concatenate(
            [next(plan.assign(size, chunk_size=10_000))[:full] for plan in rank_plans],
            axis=1,
        )
        assert np.array_equal(full_steps.ravel(), np.arange(full * plan.global_batch))
    if left and not plan.drop_last:
        shares = [plan.tail(size) for plan in rank_plans]
        assert steps == [full + (share is not None) for share in shares]
        for plan, share in zip(rank_plans, shares, strict=True):
            if share is not None:
                *_, rows = plan.assign(size, start=full * plan.global_batch)
                assert share == plan.share(size, full)
                assert rows.shape == (1, share.rows)
                order += rows[0].tolist()
                real += share.real
                assert order[len(order) - share.rows :][: share.real] == list(
                    range(share.first, share.first + share.real)
                )
        assert real == left
        pads = order[left:]
        assert order[:left] == list(range(size - left, size))
        assert pads == [position % size for position in range(size, size + len(pads))]
        assert len(pads) < world
        assert not pads or plan.even
    else:
        assert steps == [full] * world
    assert not plan.even or len(set(steps)) == 1
    assert max(steps) - min(steps) <= 1


@pytest.mark.parametrize(
    "sizes",
    [range(73), pytest.param(range(73, 201), marks=pytest.mark.exhaustive)],
    ids=["small", "large"],
)
def test_every_index_once_for_all_sizes_batches_worlds_and_settings(
    sizes: range,
) -> None:
    checked: set[LoaderPlan] = set()
    for batch, world in itertools.product(range(1, 10), range(1, 9)):
        for drop_last, even, split in itertools.product((False, True), repeat=3):
            if split and (batch % world if even else batch < world):
                continue
            rank_plans = plans_of_ranks(
                batch, world, split=split, drop_last=drop_last, even=even
            )
            # a split plan is a sharded one of another batch size
            alike = rank_plans[0]
            if alike not in checked:
                checked.add(alike)
                for size in sizes:
                    check_law(size, rank_plans)


def test_a_batch_that_cannot_be_split_is_refused_with_the_sizes_that_can() -> None:
    for batch, world in itertools.product(range(1, 10), range(1, 9)):
        if batch % world:
            smaller = batch - batch % world
            sizes = f"{smaller} or {smaller + world}, or" if smaller else f"{world}"
            with pytest.raises(ConfigError, match=rf"Set batch_size to {sizes}\b"):
                plans_of_ranks(batch, world, split=True, drop_last=False, even=True)
        if batch < world:
            with pytest.raises(ConfigError, match=f"Set batch_size to {world}"):
                plans_of_ranks(batch, world, split=True, drop_last=False, even=False)


def test_whole_batches_are_dealt_round_and_padded_with_the_first_ones() -> None:
    for size, world in itertools.product(range(20), range(1, 7)):
        for even in (True, False):
            rank_plans = [
                plan_batches(
                    num_shards=world,
                    shard=shard,
                    split=False,
                    drop_last=False,
                    even=even,
                )
                for shard in range(world)
            ]
            shares = [[row[0] for row in read_rows(plan, size)] for plan in rank_plans]
            dealt = [
                unit
                for step in itertools.zip_longest(*shares)
                for unit in step
                if unit is not None
            ]
            assert dealt[:size] == list(range(size))
            assert dealt[size:] == (
                [position % size for position in range(size, len(dealt))]
                if even
                else []
            )


def test_a_resumed_plan_reads_exactly_the_rest_on_any_world() -> None:
    for size, batch, saving_world, resuming_world in itertools.product(
        (0, 1, 7, 24, 53), (1, 3), (1, 2, 4), (1, 2, 3, 4)
    ):
        first = plans_of_ranks(
            batch, saving_world, split=False, drop_last=False, even=True
        )[0]
        for step in range(first.steps(size) + 1):
            start = min(step * first.global_batch, size)
            rank_plans = plans_of_ranks(
                batch, resuming_world, split=False, drop_last=False, even=True
            )
            remaining_units = sorted(
                unit
                for plan in rank_plans
                for number, row in enumerate(read_rows(plan, size, start))
                for unit in row[: plan.share(size, number, start).real]
            )
            assert remaining_units == list(range(start, size))


def test_steps_are_counted_from_any_start() -> None:
    for size, start, batch, world in itertools.product(
        range(0, 30, 3), range(0, 34, 2), (1, 2, 5), (1, 2, 3)
    ):
        for drop_last, even in itertools.product((False, True), repeat=2):
            for plan in plans_of_ranks(
                batch, world, split=False, drop_last=drop_last, even=even
            ):
                assert plan.steps(size, start) == len(read_rows(plan, size, start))


def test_plans_of_one_rank_take_everything_in_order() -> None:
    plan = LoaderPlan(num_shards=1, shard=0, global_batch=2)
    assert (plan.drop_last, plan.even, plan.pad) == (False, True, "least")
    assert read_rows(plan, 5) == [[0, 1], [2, 3], [4]]
    assert DataRanks(shard=0, num_shards=1, shard_of=(0,)) == SINGLE_RANK


@pytest.mark.parametrize(
    ("batch", "shape"),
    [(1, (8192, 1)), (3, (2730, 3)), (8192, (1, 8192)), (9000, (1, 9000))],
)
def test_positions_come_in_arrays_of_about_8192(
    batch: int, shape: tuple[int, int]
) -> None:
    plan = plans_of_ranks(batch, 1, split=False, drop_last=False, even=True)[0]
    assert next(plan.assign(100_000)).shape == shape


def test_one_step_costs_the_same_at_any_world_size() -> None:
    def cost(world: int) -> float:
        plan = plans_of_ranks(32, world, split=False, drop_last=False, even=True)[
            world // 2
        ]
        size = 32 * world * 1000
        start_s = time.process_time()
        count = sum(len(chunk) for chunk in plan.assign(size))
        assert count == 1000
        return time.process_time() - start_s

    small = min(cost(8) for _ in range(5))
    large = min(cost(8192) for _ in range(5))
    assert large < small * 3 + 1e-3


def test_a_rank_of_1024_computes_only_its_own_indices() -> None:
    plan = plans_of_ranks(4, 1024, split=False, drop_last=False, even=True)[1000]
    chunk = next(plan.assign(10**12, chunk_size=64))
    assert chunk.shape == (16, 4)
    assert np.array_equal(
        chunk[:2], [[4000, 4001, 4002, 4003], [8096, 8097, 8098, 8099]]
    )


def test_cut_covers_without_gap_for_every_share() -> None:
    for size, world in itertools.product(range(30), range(1, 9)):
        uneven = [split_units(size, world, shard, False) for shard in range(world)]
        assert sum(share.rows for share in uneven) == size
        even = [split_units(size, world, shard, True) for shard in range(world)]
        assert sum(share.real for share in even) == size
        assert len({share.rows for share in even}) == 1


def test_shards_differ_in_nothing_else() -> None:
    first, second = plans_of_ranks(3, 2, split=False, drop_last=True, even=True)
    assert replace(second, shard=0) == first
