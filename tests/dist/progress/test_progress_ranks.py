"""Progress on several ranks: one shows, the slow one is found, and nobody waits for anybody."""

from __future__ import annotations

import io
import logging
import time
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader

from hasten import Accelerator, DataLoaderConfiguration
from hasten.accelerator.setup import RunLogPart
from hasten.config.sections.loop import Pad
from hasten.progress.build import make_progress, straggler_watch
from hasten.progress.straggler import BackwardTimer
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks


@ranks(2, 4)
def test_the_slow_rank_is_named_on_the_main_process(ctx: ProcessContext) -> None:
    file, size = io.StringIO(), ctx.world.size
    watch, pulse = straggler_watch(ctx, every_s=0.05), BackwardTimer(ctx.device)
    assert watch is not None
    bar = make_progress(
        range(30),
        ctx=ctx,
        console=Console(file=file),
        every_s=0.0,
        pulse=pulse,
        watch=watch,
    )
    for _ in bar:
        time.sleep(0.02 if ctx.world.rank == size - 1 else 0.002)
        pulse.backward()
        # the gradients' all-reduce, where the fast ranks wait
        ctx.world.all_reduce(torch.ones(1))
    if ctx.world.rank == 0:
        assert f"rank {size - 1} is slower than the others" in file.getvalue()
    else:
        assert file.getvalue() == ""
        assert watch.found is None


@ranks(2)
def test_the_slow_rank_is_named_once_in_lines_that_stay(ctx: ProcessContext) -> None:
    file = io.StringIO()
    logged = io.StringIO()
    handler = logging.StreamHandler(logged)
    logging.getLogger("hasten").addHandler(handler)
    watch, pulse = straggler_watch(ctx, every_s=0.05), BackwardTimer(ctx.device)
    try:
        for _ in range(2):  # as in two epochs
            bar = make_progress(
                range(10),
                ctx=ctx,
                console=Console(file=file),
                every_s=0.0,
                pulse=pulse,
                watch=watch,
            )
            for _ in bar:
                time.sleep(0.02 if ctx.world.rank == 1 else 0.002)
                pulse.backward()
                ctx.world.all_reduce(torch.ones(1))
    finally:
        logging.getLogger("hasten").removeHandler(handler)
    named = (file.getvalue() + logged.getvalue()).count(
        "rank 1 is slower than the others"
    )
    assert named == (1 if ctx.world.rank == 0 else 0)


@ranks(2)
def test_a_loop_on_the_main_process_alone_does_not_hang(ctx: ProcessContext) -> None:
    watch, pulse = straggler_watch(ctx, every_s=0.0), BackwardTimer(ctx.device)
    if ctx.world.rank == 0:
        read_numbers = []
        for number in make_progress(
            range(5),
            ctx=ctx,
            console=Console(file=io.StringIO()),
            pulse=pulse,
            watch=watch,
        ):
            pulse.backward()
            read_numbers.append(number)
        assert read_numbers == [0, 1, 2, 3, 4]
        assert watch is not None
        assert watch.found is None, "a rank that has no loop is not a slow one"


@pytest.mark.parametrize("pad", ["least", "full"])
@pytest.mark.parametrize("batch_size", [3, 4, 8])
@ranks(2, 3)
def test_a_short_batch_counts_its_samples_on_every_rank(
    ctx: ProcessContext, pad: Pad, batch_size: int
) -> None:
    """30 samples are 30 in the counters of metrics, of the report and of throughput, in every split."""
    settings = DataLoaderConfiguration(pad=pad)
    accelerator = Accelerator(
        context=ctx, dataloader_config=settings, metrics={"port": 0}
    )
    net = nn.Linear(1, 1)
    rows: Any = [
        {"x": torch.ones(1), "input_ids": torch.zeros(5, dtype=torch.long)}
    ] * 30
    model, _, loader = accelerator.prepare(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        DataLoader(rows, batch_size=batch_size),
    )
    throughput = accelerator.track_throughput(tokens="input_ids")
    for batch in loader:
        accelerator.backward(model(batch["x"]).mean())
    log = next(
        run_part.run_log
        for run_part in accelerator._clock.parts.members
        if isinstance(run_part, RunLogPart)
    )
    assert (log.samples, throughput._tokens) == (30, 150)
    accelerator.end_training()
