"""Partition of blocks into pipeline stages, and of stages over ranks; pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from hasten.config.sections.parallel import PipelineSchedule
from hasten.errors import ConfigError

Range = tuple[int, int]
"""First block of a stage, and first block of the next stage."""
SINGLE: Final = ("gpipe", "1f1b")
"""Schedules with one stage on each rank."""
IN_A_V: Final = "zbv_zero_bubble"
"""Schedule with two stages per rank, whose stages are ordered down the ranks and back up."""


def balance_ranges(
    block_costs: Sequence[float],
    num_ranges: int,
    cost_before: float = 0.0,
    cost_after: float = 0.0,
) -> tuple[Range, ...]:
    """Return contiguous ranges of at least one block each, with the lowest possible maximum cost.

    `before` and `after` are additional costs of the first and of the last range. Among equally good partitions the most even
    one is chosen.
    """
    assert 1 <= num_ranges <= len(block_costs), (
        f"{len(block_costs)} blocks do not make {num_ranges} parts"
    )
    cost_sums = [0.0, *accumulate(block_costs)]
    num_blocks = len(block_costs)

    def range_cost(start: int, stop: int) -> float:
        total_cost = cost_sums[stop] - cost_sums[start]
        if start == 0:
            total_cost += cost_before
        if stop == num_blocks:
            total_cost += cost_after
        return total_cost

    best_partitions = {
        stop: ((range_cost(0, stop), range_cost(0, stop) ** 2), [(0, stop)])
        for stop in range(1, num_blocks - num_ranges + 2)
    }
    for num_parts in range(2, num_ranges + 1):
        longer_partitions = {}
        for stop in range(num_parts, num_blocks - num_ranges + num_parts + 1):
            longer_ranges = []
            for start, (costs, ranges) in best_partitions.items():
                if start < stop:
                    highest_cost, spread = costs
                    last_cost = range_cost(start, stop)
                    new_costs = (max(highest_cost, last_cost), spread + last_cost**2)
                    longer_ranges.append((new_costs, [*ranges, (start, stop)]))
            longer_partitions[stop] = min(
                longer_ranges, key=lambda candidate: candidate[0]
            )
        best_partitions = longer_partitions
    return tuple(best_partitions[num_blocks][1])


@dataclass(frozen=True, slots=True)
class StagePlacement:
    """Assignment of stages to the ranks of a pipeline."""

    ranks: int
    per_rank: int = 1
    in_a_v: bool = False

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.ranks * self.per_rank

    def rank_of(self, stage: int) -> int:
        """Return the pipeline position of the rank that holds a stage."""
        turn, position = divmod(stage, self.ranks)
        return self.ranks - 1 - position if self.in_a_v and turn % 2 else position

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, ascending."""
        return tuple(
            stage for stage in range(self.stages) if self.rank_of(stage) == rank
        )


def place_stages(
    schedule: PipelineSchedule, ranks: int, stages_per_rank: int | None
) -> StagePlacement:
    """Return the placement of a schedule's stages. Raises: ConfigError for an unsupported number of stages per rank."""
    default_count = 1 if schedule in SINGLE else 2
    per_rank = stages_per_rank or default_count
    is_fixed = schedule in SINGLE or schedule == IN_A_V
    if is_fixed and per_rank != default_count:
        raise ConfigError(
            f"pp_handler.stages_per_rank={per_rank} is not supported with schedule {schedule!r}, which has {default_count} "
            f"stage{'s' if default_count > 1 else ''} on each rank. Leave it out, or use 'interleaved_1f1b'."
        )
    return StagePlacement(ranks, per_rank, schedule == IN_A_V)


def default_microbatches(schedule: PipelineSchedule, ranks: int) -> int:
    """Return the default number of micro-batches per step: one per rank, twice as many for the zero-bubble V."""
    return 2 * ranks if schedule == IN_A_V else ranks


def check_microbatches(schedule: PipelineSchedule, ranks: int, count: int) -> None:
    """Raise ConfigError, with numbers that work, unless the schedule can run this number of micro-batches."""
    if schedule == "1f1b" and count < ranks:
        raise ConfigError(
            f"num_microbatches={count} is less than pp_size={ranks}, and schedule '1f1b' needs at least one micro-batch "
            f"per rank. Set num_microbatches to {ranks} or more, or use 'gpipe'."
        )
    if schedule in ("interleaved_1f1b", "interleaved_zero_bubble") and count % ranks:
        raise ConfigError(
            f"num_microbatches={count} is not a multiple of pp_size={ranks}, which schedule {schedule!r} needs. Set it "
            f"to {max(1, count // ranks) * ranks}, or use '1f1b' or 'gpipe'."
        )
    if schedule == IN_A_V and count < 2 * ranks:
        raise ConfigError(
            f"num_microbatches={count} is less than twice pp_size={ranks}, which schedule {schedule!r} needs to have no "
            f"bubble. Set it to {2 * ranks} or more."
        )
