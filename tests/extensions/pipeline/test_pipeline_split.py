"""Dividing blocks into stages and stages over ranks: laws over sizes, against brute force where it can be had."""

from __future__ import annotations

import itertools
import random

import pytest

from hasten.config.sections.parallel import PipelineSchedule
from hasten.errors import ConfigError
from hasten.extensions.pipeline.stage_plan import (
    StagePlacement,
    balance_ranges,
    check_microbatches,
    default_microbatches,
    place_stages,
)
from hasten.strategies.micro_batches import check_rows

SCHEDULES: tuple[PipelineSchedule, ...] = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "zbv_zero_bubble",
    "loop_bfs",
)


def most(
    costs: list[float],
    ranges: tuple[tuple[int, int], ...],
    cost_before: float,
    cost_after: float,
) -> float:
    sums = [sum(costs[start:stop]) for start, stop in ranges]
    sums[0] += cost_before
    sums[-1] += cost_after
    return max(sums)


def every_division(length: int, num_stages: int) -> list[tuple[tuple[int, int], ...]]:
    divisions = []
    for inner in itertools.combinations(range(1, length), num_stages - 1):
        bounds = [0, *inner, length]
        divisions.append(tuple(itertools.pairwise(bounds)))
    return divisions


def test_ranges_cover_all_blocks_and_none_is_better() -> None:
    rng = random.Random(0)
    for length in range(1, 9):
        for num_stages in range(1, length + 1):
            for _ in range(4):
                costs = [float(rng.randint(0, 9)) for _ in range(length)]
                cost_before, cost_after = (
                    float(rng.randint(0, 9)),
                    float(rng.randint(0, 9)),
                )
                ranges = balance_ranges(costs, num_stages, cost_before, cost_after)
                assert [
                    i for start, stop in ranges for i in range(start, stop)
                ] == list(range(length))
                assert len(ranges) == num_stages
                assert all(start < stop for start, stop in ranges)
                best = min(
                    most(costs, division, cost_before, cost_after)
                    for division in every_division(length, num_stages)
                )
                assert most(costs, ranges, cost_before, cost_after) == best


@pytest.mark.parametrize("num_stages", [2, 4, 8, 16])
def test_equal_blocks_are_divided_evenly(num_stages: int) -> None:
    sizes = [stop - start for start, stop in balance_ranges([1.0] * 96, num_stages)]
    assert max(sizes) - min(sizes) <= 1
    assert balance_ranges([1.0] * 4, 2, cost_before=0, cost_after=2) == (
        (0, 3),
        (3, 4),
    ), "a heavy head takes blocks off its stage"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_lies_on_one_rank(schedule: PipelineSchedule) -> None:
    for ranks in range(1, 17):
        placement = place_stages(schedule, ranks, None)
        stages = [stage for rank in range(ranks) for stage in placement.stages_of(rank)]
        assert sorted(stages) == list(range(placement.stages))
        assert all(
            len(placement.stages_of(rank)) == placement.per_rank
            for rank in range(ranks)
        )
        check_microbatches(schedule, ranks, default_microbatches(schedule, ranks))
    assert place_stages("zbv_zero_bubble", 3, None).stages_of(0) == (0, 5), (
        "the V ends where it began"
    )
    assert StagePlacement(2, 3).stages_of(1) == (1, 3, 5)


def test_numbers_that_do_not_fit_are_refused_with_numbers_that_do() -> None:
    with pytest.raises(ConfigError, match="has 1 stage on each rank"):
        place_stages("1f1b", 2, 2)
    with pytest.raises(ConfigError, match="has 2 stages on each rank"):
        place_stages("zbv_zero_bubble", 2, 3)
    with pytest.raises(ConfigError, match="Set num_microbatches to 4 or more"):
        check_microbatches("1f1b", 4, 3)
    with pytest.raises(ConfigError, match="Set it to 4"):
        check_microbatches("interleaved_1f1b", 4, 6)
    with pytest.raises(ConfigError, match="Set it to 8 or more"):
        check_microbatches("zbv_zero_bubble", 4, 7)
    with pytest.raises(ConfigError, match=r"from \[1, 2, 3, 6\]"):
        check_rows(6, 4)
    with pytest.raises(ConfigError, match="without a tensor that has rows"):
        check_rows(None, 4)
    assert check_rows(8, 4) == 2
