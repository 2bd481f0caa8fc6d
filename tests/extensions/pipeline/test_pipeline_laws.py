"""Pipeline parallel trains like one plain process: every schedule, alone and with data and tensor parallelism around it.

Tolerances with AdamW over 8 steps, two in each phase, or 20: float32 differs from plain torch by the order of sums only (1e-5 on a loss of 3);
bf16 keeps 8 bits of every product and the reference is float32 (5e-2).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten import Accelerator, ParallelismConfig, PipelineParallelConfig
from hasten.config.sections.parallel import PipelineSchedule
from hasten.errors import ConfigError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.testing.toys import TinyLM, next_token_loss, seeded
from tests.support.training import (
    Batch,
    Task,
    hasten_losses,
    plain_losses,
    through_stages,
)

STEPS = [8, pytest.param(20, marks=pytest.mark.exhaustive)]
VOCAB = 16
SCHEDULES: tuple[PipelineSchedule, ...] = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "zbv_zero_bubble",
    "loop_bfs",
)


def batches(steps: int) -> list[Batch]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randint(0, VOCAB, (24, 6), generator=g),) for _ in range(steps)]


def loss_of(net: nn.Module, batch: Batch) -> Tensor:
    return next_token_loss(net(batch[0]), batch[0])


def task(tied: bool) -> Task:
    def build() -> TinyLM:
        return seeded(
            lambda: TinyLM(vocab=VOCAB, width=8, heads=4, depth=4, context=6, tied=tied)
        )

    return Task(build, batches, loss_of)


def check(
    schedule: PipelineSchedule,
    tied: bool,
    precision: str,
    steps: int,
    tolerance: float,
    **sizes: Any,
) -> None:
    config = ParallelismConfig(
        **sizes, pp_handler=PipelineParallelConfig(schedule=schedule)
    )
    accelerator = Accelerator(mixed_precision=precision, parallelism_config=config)
    actual_losses = torch.tensor(
        hasten_losses(accelerator, task(tied), steps, through_stages)
    )
    expected = torch.tensor(plain_losses(task(tied), steps))
    torch.testing.assert_close(
        actual_losses,
        expected,
        rtol=0,
        atol=tolerance,
        msg=lambda m: f"{schedule} {sizes} {precision}: {m}",
    )


@ranks(2)
@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(
            name,
            marks=[pytest.mark.exhaustive]
            if name in ("interleaved_zero_bubble", "loop_bfs")
            else [],
        )
        for name in SCHEDULES
    ],
)
@pytest.mark.parametrize("steps", STEPS)
def test_every_schedule_trains_like_plain_torch(
    ctx: ProcessContext, schedule: PipelineSchedule, steps: int
) -> None:
    check(schedule, True, "no", steps, 1e-5, pp_size=2)


@ranks(2)
@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(name, marks=() if name == "1f1b" else pytest.mark.exhaustive)
        for name in SCHEDULES
    ],
)
def test_every_schedule_trains_like_plain_torch_in_bf16(
    ctx: ProcessContext, schedule: PipelineSchedule
) -> None:
    check(schedule, False, "bf16", 4, 5e-2, pp_size=2)


@ranks(4)
@pytest.mark.parametrize(
    "sizes",
    [
        {"dp_shard_size": 2},
        *(
            pytest.param({name: 2}, marks=pytest.mark.exhaustive)
            for name in ("dp_replicate_size", "tp_size")
        ),
    ],
    ids=str,
)
def test_stages_combine_with_other_axes(
    ctx: ProcessContext, sizes: dict[str, int]
) -> None:
    check("1f1b", True, "no", 8, 1e-5, pp_size=2, **sizes)


@ranks(4)
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "sizes", [{"dp_replicate_size": 2}, {"dp_shard_size": 2}, {"tp_size": 2}], ids=str
)
def test_stages_combine_with_other_axes_in_bf16(
    ctx: ProcessContext, sizes: dict[str, int]
) -> None:
    check("1f1b", False, "bf16", 4, 5e-2, pp_size=2, **sizes)


@ranks(4)
@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "sizes", [{"dp_replicate_size": 2}, {"dp_shard_size": 2}, {"tp_size": 2}], ids=str
)
def test_every_schedule_combines_with_other_axes(
    ctx: ProcessContext, schedule: PipelineSchedule, sizes: dict[str, int]
) -> None:
    if "dp_shard_size" in sizes and "zero_bubble" in schedule:
        with pytest.raises(ConfigError, match="Use '1f1b'"):
            check(schedule, True, "no", 1, 1e-5, pp_size=2, **sizes)
        return
    check(schedule, True, "no", 8, 1e-5, pp_size=2, **sizes)
