"""A training by the Trainer that is killed again and again (SIGKILL) ends with the weights of one that was left alone."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hasten import Trainer, TrainerCallback, TrainingArguments
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import Pool
from hasten.testing.toys import seeded
from tests.support.toys import Rows, Scored

BATCHES_A_KILL = 9
LATE_S = 0.05


class Killed(TrainerCallback):
    """Kills its process after some batches, in the middle of an accumulation window or not, and a moment later if asked."""

    def __init__(self, batches: int, late_s: float) -> None:
        self.left, self.late_s = batches, late_s

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            if not self.late_s:
                os.kill(os.getpid(), signal.SIGKILL)
            # perhaps during a save
            threading.Timer(self.late_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self._count()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._count()


def train(
    ctx: ProcessContext, folder: Path, kill: tuple[int, int, float] | None
) -> list[Tensor]:
    """Train, or go on from the newest checkpoint; `kill` is the rank that dies, after how many batches, and how late."""
    args = TrainingArguments(
        str(folder), num_train_epochs=4, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=3e-2,
        weight_decay=0.1, warmup_steps=2, logging_steps=3, save_strategy="steps", save_steps=2, save_total_limit=2,
        disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    callbacks = [Killed(*kill[1:])] if kill is not None and kill[0] == ctx.rank else []
    # whatever happened before must not matter
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    trainer = Trainer(seeded(Scored), args, train_dataset=Rows(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint="auto")
    tensors = [
        t.detach().clone()
        for t in trainer.accelerator.unwrap_model(trainer.wrapped_model)
        .state_dict()
        .values()
    ]
    for values in trainer.optimizer.state.values():
        tensors += [value.clone() for value in values.values()]
    return tensors


def killed_equals_whole(pool: Pool, folder: Path, num_ranks: int, kills: int) -> None:
    """Kill `kills` times; each training that reaches its end, and the last, must equal the one that was left alone."""
    rng = random.Random(num_ranks)
    uninterrupted = pool.run(train, num_ranks, folder / "whole", None)
    done, run, finished = 0, 0, False
    # the training of the last kill comes to its end too
    while done < kills or not finished:
        kill = None
        if done < kills:
            late_s = rng.choice((0.0, rng.uniform(0, LATE_S)))
            kill = (rng.randrange(num_ranks), rng.randint(1, BATCHES_A_KILL), late_s)
        outcomes = pool.outcomes(train, num_ranks, folder / f"run{run}", kill)
        if kill is not None and outcomes[kill[0]].status == "died":
            done, finished = done + 1, False
            continue
        assert [outcome.status for outcome in outcomes] == ["returned"] * num_ranks, (
            outcomes
        )
        run, finished = run + 1, True
        for rank, outcome in enumerate(outcomes):
            for actual, expected in zip(
                outcome.value, uninterrupted[rank], strict=True
            ):
                assert torch.equal(actual, expected), f"rank {rank} after {done} kills"
    assert done == kills


@pytest.mark.parametrize(
    "num_ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)]
)
def test_a_training_killed_at_random_batches_ends_as_the_whole_one(
    rank_pool: Pool, tmp_path: Path, num_ranks: int
) -> None:
    killed_equals_whole(rank_pool, tmp_path, num_ranks, 3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_training_killed_twenty_times_at_random_batches_ends_as_the_whole_one(
    rank_pool: Pool, tmp_path: Path, num_ranks: int
) -> None:
    killed_equals_whole(rank_pool, tmp_path, num_ranks, 20)
