"""Seeds and logs on several ranks."""

from __future__ import annotations

import logging
import logging.handlers
import os
import random
import time
from pathlib import Path

import numpy as np
import torch

from hasten.accelerator.facade import Accelerator
from hasten.runtime.context import ProcessContext
from hasten.runtime.logs import get_logger
from hasten.runtime.seeding import RngState, set_seed, synchronize_rng_states
from hasten.testing.pool import ranks


@ranks(2, 4)
def test_synchronized_generators_agree_and_the_others_do_not(
    ctx: ProcessContext,
) -> None:
    for kinds in (
        ["python"],
        ["numpy"],
        ["torch"],
        ["generator"],
        ["python", "numpy", "torch", "cpu", "generator"],
    ):
        set_seed(10, device_specific=True)
        generator = torch.Generator().manual_seed(ctx.rank)
        synchronize_rng_states(kinds, ctx.world, generator)
        drawn = {
            "python": random.random(),
            "numpy": float(np.random.rand()),
            "torch": torch.rand(1).item(),
            "generator": torch.rand(1, generator=generator).item(),
        }
        everyone = ctx.world.all_gather_object(drawn)
        for kind in drawn:
            values = {their[kind] for their in everyone}
            assert len(values) == (1 if kind in kinds else ctx.world.size), (
                kinds,
                kind,
            )


@ranks(2)
def test_each_rank_restores_its_own_state(ctx: ProcessContext) -> None:
    set_seed(3, device_specific=True)
    state = RngState.capture(ctx.device)
    expected = torch.rand(2).tolist()
    set_seed(0)
    state.restore(ctx.device)
    assert torch.rand(2).tolist() == expected
    assert len({tuple(x) for x in ctx.world.all_gather_object(expected)}) == 2


@ranks(2, 3)
def test_ranks_log_in_order(ctx: ProcessContext, tmp_path: Path) -> None:
    path = tmp_path / "log"
    handler = logging.FileHandler(path)
    log = get_logger("test.ranks.order", "INFO" if ctx.rank != 1 else "ERROR")
    log.logger.addHandler(handler)
    time.sleep(0.05 * (ctx.world.size - ctx.rank))  # the last rank is there first
    log.error("hello", main_process_only=False, in_order=True)
    log.info(
        "rank 1 is not interested, and nobody waits for it",
        main_process_only=False,
        in_order=True,
    )
    log.info("main speaks")
    ctx.world.barrier("logged")
    log.logger.removeHandler(handler)
    handler.close()
    lines = path.read_text().splitlines()
    size = ctx.world.size
    assert lines[:size] == [f"[RANK {rank}] hello" for rank in range(size)]
    assert [line[:8] for line in lines[size:-1]] == [
        f"[RANK {rank}]" for rank in range(size) if rank != 1
    ]
    assert lines[-1] == "main speaks"


@ranks(1, 2)
def test_affinity_is_set_when_asked_for_and_says_why(ctx: ProcessContext) -> None:
    initial_affinity = os.sched_getaffinity(0)
    handler = logging.handlers.BufferingHandler(100)
    setup = logging.getLogger("hasten.accelerator.setup")
    setup.addHandler(handler)
    setup.setLevel(logging.INFO)
    os.environ["ACCELERATE_CPU_AFFINITY"] = "1"
    try:
        Accelerator(cpu=True)
    finally:
        setup.removeHandler(handler)
        setup.setLevel(logging.NOTSET)
        os.sched_setaffinity(0, initial_affinity)
    messages = [record.getMessage() for record in handler.buffer]
    assert any(
        line.startswith("cpu affinity: ") and "cores" in line for line in messages
    ), messages
