"""A Trainer resumed on another number of processes: it ends after its epochs, and its schedule ends with them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from hasten import Trainer, TrainerCallback, TrainingArguments
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import Pool
from hasten.testing.toys import seeded
from tests.support.toys import Rows, Scored

NUM_SAMPLES = 61


class RecordingTrainer(Trainer):
    """Trainer that records the samples it trains on."""

    def training_step(
        self, model: nn.Module, inputs: Any
    ) -> tuple[Tensor, Tensor | None]:
        self.samples.extend(self.train_loader.samples())
        return super().training_step(model, inputs)

    samples: list[int]


class StopAfter(TrainerCallback):
    """Callback that saves and stops after a number of updates of this process."""

    def __init__(self, num_updates: int) -> None:
        self.num_updates = num_updates

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_updates -= 1
        if self.num_updates == 0:
            control.should_save = control.should_training_stop = True


def train(
    ctx: ProcessContext, folder: Path, num_updates: int, changes: dict[str, Any]
) -> tuple[list[int], dict[str, Any]]:
    """Train from the newest checkpoint; return the samples that this rank read, and numbers of the run."""
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        learning_rate=0.1,
        save_strategy="no",
        disable_tqdm=True,
        **{"num_train_epochs": 3, **changes},
    )
    trainer = RecordingTrainer(
        seeded(Scored),
        args,
        train_dataset=Rows(NUM_SAMPLES),
        callbacks=[StopAfter(num_updates)],
    )
    trainer.samples = []
    trainer.train(resume_from_checkpoint="auto")
    state = trainer.state
    rate = trainer.lr_scheduler.get_last_lr()[0]
    return trainer.samples, {
        "rate": rate,
        "epoch": state.epoch,
        "step": state.global_step,
        "max_steps": state.max_steps,
    }


@pytest.mark.parametrize(
    ("worlds", "changes"),
    [
        (((1, 24), (2, -1)), {}),
        (((2, 12), (1, -1)), {"lr_scheduler_type": "cosine", "warmup_ratio": 0.1}),
        (((2, 11), (1, 7), (2, -1)), {}),
        (((1, 16), (3, 3), (2, -1)), {}),
        (((1, 3), (2, -1)), {"gradient_accumulation_steps": 2}),
        (((1, 24), (2, -1)), {"num_train_epochs": 2.5}),
    ],
)
def test_a_run_on_changing_processes_ends_after_its_epochs(
    rank_pool: Pool,
    tmp_path: Path,
    worlds: tuple[tuple[int, int], ...],
    changes: dict[str, Any],
) -> None:
    num_epochs = changes.get("num_train_epochs", 3)
    counts, step = [0] * NUM_SAMPLES, 0
    numbers: dict[str, Any] = {}
    for world, num_updates in worlds:
        outcomes = rank_pool.run(train, world, tmp_path, num_updates, changes)
        for samples, _ in outcomes:
            for sample in samples:
                counts[sample] += 1
        numbers = outcomes[0][1]
        assert num_updates < 0 or numbers["step"] == step + num_updates, (
            "updates are counted as they are made"
        )
        step = numbers["step"]
    assert set(counts) <= {math.floor(num_epochs), math.ceil(num_epochs)}, (
        "each sample once an epoch"
    )
    assert numbers["epoch"] == pytest.approx(num_epochs, abs=0.02)
    assert numbers["rate"] == pytest.approx(0.0, abs=1e-6), "the schedule ended"
    assert numbers["step"] == numbers["max_steps"]
