"""What concerns every rank is said once, by the main process, and names the rank it came from."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from hasten import Accelerator
from hasten.errors import CheckpointError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import Pool, ranks


@contextmanager
def heard() -> Iterator[list[str]]:
    """The warnings that hasten logs on this rank while the block runs."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hasten")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


@ranks(2)
def test_a_stop_is_announced_once(ctx: ProcessContext) -> None:
    accelerator = Accelerator(context=ctx)
    with heard() as messages:
        was_preempted = accelerator.preempted
        if ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        ctx.world.barrier("signalled")
        assert (was_preempted, accelerator.preempted, accelerator.preempted) == (
            False,
            True,
            True,
        )
    accelerator.end_training()
    expected = ["rank 1 was told to stop by SIGUSR1; save and exit with code 85"]
    assert ctx.world.all_gather_object(messages) == [expected, []]


def save(ctx: ProcessContext, folder: str) -> None:
    """Two checkpoints of a run, the newer one without its manifest, as a copy that did not end leaves it."""
    accelerator = Accelerator(context=ctx, project_dir=folder)
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.save_state()
    accelerator.save_state()
    accelerator.end_training()
    if ctx.is_main:
        Path(folder, "checkpoints/checkpoint_1/manifest.json").unlink()


def load(ctx: ProcessContext, folder: str) -> list[list[str]]:
    """What each rank says while it loads the newest complete one."""
    accelerator = Accelerator(context=ctx, project_dir=folder)
    accelerator.prepare(torch.nn.Linear(2, 2))
    with heard() as messages:
        accelerator.load_state()
    accelerator.end_training()
    said_by_all: list[list[str]] = ctx.world.all_gather_object(messages)
    return said_by_all


def test_what_a_load_passes_over_and_derives_is_said_once(
    rank_pool: Pool, tmp_path: Path
) -> None:
    rank_pool.run(save, 1, str(tmp_path))
    main, other_rank = rank_pool.run(load, 2, str(tmp_path))[0]
    assert other_rank == []
    assert len(main) == 2
    assert main[0].startswith(
        f"using checkpoint_0 in {tmp_path}/checkpoints and skipping newer ones: "
    )
    assert "checkpoint_1" in main[0]
    assert "saved by 1 processes and is loaded by 2" in main[1]


@ranks(2)
def test_a_path_that_is_no_checkpoint_is_told_on_every_rank(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    accelerator = Accelerator(context=ctx, project_dir=str(tmp_path))
    accelerator.prepare(torch.nn.Linear(2, 2))
    checkpoint_path = Path(accelerator.save_state())
    for wrong, words in (
        (
            checkpoint_path / "model.safetensors",
            rf"is a file; .* give the folder it is in, {checkpoint_path}",
        ),
        (tmp_path / "absent", "does not exist, so there is no checkpoint to load"),
        # a folder that one machine has and the other has not
        (
            checkpoint_path if ctx.rank else tmp_path / "absent",
            "does not exist, so there is no checkpoint to load",
        ),
    ):
        with pytest.raises(CheckpointError, match=words):
            accelerator.load_state(wrong)
    accelerator.end_training()
