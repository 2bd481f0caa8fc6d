"""What a step of the Trainer costs over the same loop written by hand on the Accelerator, as a part of a 5 ms step.

python benchmarks/trainer_overhead.py --steps 1000 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from hasten import (
    Accelerator,
    DataLoaderConfiguration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    get_scheduler,
)
from hasten.testing.toys import Rows, Scored, seeded

STEP_S = 5e-3


def only_used(samples: list[Any]) -> Any:
    """The batch without the column that the model does not take, as the Trainer drops it."""
    return default_data_collator([{"x": sample["x"], "label": sample["label"]} for sample in samples])


def by_hand(folder: str, steps: int) -> float:
    """Seconds of processor time of a step of the hand-written loop, which other programs disturb less than the clock's."""
    settings = DataLoaderConfiguration(data_seed=42)
    accelerator = Accelerator(cpu=True, project_dir=folder, dataloader_config=settings)
    model: Any = seeded(Scored)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=5e-5)
    scheduler: Any = get_scheduler("linear", optimizer, 0, steps)
    loader: Any = DataLoader(Rows(steps * 8), batch_size=8, shuffle=True, collate_fn=only_used)  # type: ignore[arg-type]
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    began = time.process_time()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss, weight=(batch["labels"] != -100).sum())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    seconds = time.process_time() - began
    accelerator.end_training()
    return seconds / steps


def by_trainer(folder: str, steps: int) -> float:
    """Seconds of a step of the Trainer, with its progress bar, logging every 50 steps."""
    args = TrainingArguments(
        folder, num_train_epochs=1, use_cpu=True, save_strategy="no", logging_steps=50, report_to="jsonl"
    )
    clock = Clock()
    Trainer(seeded(Scored), args, train_dataset=Rows(steps * 8), callbacks=[clock]).train()
    return clock.seconds / steps


class Clock(TrainerCallback):
    """Reads the processor's time at the beginning and the end."""

    seconds = 0.0

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Begin, where the loop by hand begins."""
        self.seconds -= time.process_time()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """End."""
        self.seconds += time.process_time()


def main() -> None:
    """Time both by turns and print the difference of the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the numbers to this JSON file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    hand, trained = [], []
    with tempfile.TemporaryDirectory() as folder:
        by_hand(folder, 100)
        by_trainer(folder, 100)
        for _ in range(given.rounds):
            hand.append(by_hand(folder, given.steps))
            trained.append(by_trainer(folder, given.steps))
    extra = statistics.median(b - a for a, b in zip(hand, trained, strict=True))
    found = {
        "by_hand_us": round(statistics.median(hand) * 1e6, 1),
        "trainer_us": round(statistics.median(trained) * 1e6, 1),
        "extra_us": round(extra * 1e6, 1),
        "extra_of_a_5_ms_step": round(extra / STEP_S, 4),
    }
    print(json.dumps(found, indent=2))
    if given.out:
        given.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
