"""What a step of the Trainer costs over the same loop written by hand on the Accelerator, as a part of a 5 ms step.

    python benchmarks/trainer_overhead.py                  # the GPU if there is one
    python benchmarks/trainer_overhead.py --device cpu

Both train the same model on the same rows, by turns in one process; the Trainer also shows its progress bar and logs every
50 steps, the loop by hand does neither. Two sizes: a tiny step, where nothing of the Trainer's work hides behind the device's, so
that the difference is all of it; and a step of about 5 ms, where the two are compared as they are. On a GPU the clock
counts, with the device synchronised at both ends; on a CPU processor time, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from loading import versions
from recording import RESULTS, record
from torch.utils.data import DataLoader

from hasten import Accelerator, DataLoaderConfiguration, Trainer, TrainerCallback, TrainingArguments
from hasten.testing.toys import seeded
from hasten.trainer import default_data_collator, get_scheduler
from tests.support.toys import Rows, Scored

STEP_S, LIMIT, BATCH, DECAY = 5e-3, 0.02, 8, 0.01
Clock = Callable[[], float]
Model = Callable[[], Any]


def only_used(samples: list[Any]) -> Any:
    """The batch without the column that the model does not take, as the Trainer drops it."""
    return default_data_collator([{"x": sample["x"], "label": sample["label"]} for sample in samples])


def by_hand(folder: str, make: Model, steps: int, cpu: bool, clock: Clock) -> float:
    """Seconds of a step of the hand-written loop."""
    accelerator = Accelerator(cpu=cpu, project_dir=folder, dataloader_config=DataLoaderConfiguration(data_seed=42))
    model: Any = make()
    decayed, rest = [[p for p in model.parameters() if (p.ndim >= 2) is big] for big in (True, False)]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]  # as the Trainer's
    optimizer: Any = torch.optim.AdamW(groups, lr=5e-5)
    scheduler: Any = get_scheduler("linear", optimizer, 0, steps)
    loader: Any = DataLoader(Rows(steps * BATCH), batch_size=BATCH, shuffle=True, collate_fn=only_used)  # type: ignore[arg-type]
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    model.train()
    began = clock()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss, weight=(batch["labels"] != -100).sum())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    seconds = clock() - began
    accelerator.end_training()
    return seconds / steps


def by_trainer(folder: str, make: Model, steps: int, cpu: bool, clock: Clock) -> float:
    """Seconds of a step of the Trainer, with its progress bar, logging every 50 steps."""
    args = TrainingArguments(
        folder, num_train_epochs=1, per_device_train_batch_size=BATCH, use_cpu=cpu, save_strategy="no", logging_steps=50,
        weight_decay=DECAY, report_to="jsonl",
    )  # fmt: skip
    stopwatch = Stopwatch(clock)
    Trainer(make(), args, train_dataset=Rows(steps * BATCH), callbacks=[stopwatch]).train()
    return stopwatch.seconds / steps


class Stopwatch(TrainerCallback):
    """Reads the clock where the loop by hand does."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.seconds = clock, 0.0

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Begin."""
        self.seconds -= self.clock()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """End."""
        self.seconds += self.clock()


def synchronised() -> float:
    """The time by the clock when the GPU has done all it was given."""
    torch.cuda.synchronize()
    return time.perf_counter()


def five_ms_model(folder: str, cpu: bool, clock: Clock) -> Model:
    """A model whose step by hand takes about 5 ms: the width is scaled by what two steps of it cost."""
    hidden = 64
    while True:
        make = partial(seeded, partial(Scored, hidden=hidden))
        by_hand(folder, make, 5, cpu, clock)
        if by_hand(folder, make, 20, cpu, clock) >= STEP_S or hidden > 2**26:
            return make
        hidden *= 2


def measure(folder: str, make: Model, steps: int, rounds: int, cpu: bool) -> dict[str, float]:
    """Time both by turns; the difference is the median of those within a round."""
    clock = time.process_time if cpu else synchronised
    hand, trained = [], []
    by_hand(folder, make, steps // 10, cpu, clock)
    by_trainer(folder, make, steps // 10, cpu, clock)
    for turn in range(rounds):
        pair = [(by_hand, hand), (by_trainer, trained)]
        for run, seconds in pair if turn % 2 else reversed(pair):
            seconds.append(run(folder, make, steps, cpu, clock))
    extra = statistics.median(b - a for a, b in zip(hand, trained, strict=True))
    return {
        "by_hand_us": round(statistics.median(hand) * 1e6, 1),
        "trainer_us": round(statistics.median(trained) * 1e6, 1),
        "extra_us": round(extra * 1e6, 1),
        "extra_of_5_ms": round(extra / STEP_S, 4),
    }


def page(found: dict[str, Any]) -> str:
    """The numbers as a table."""
    lines = [
        "# The Trainer's cost over the loop by hand", "", f"{found['device']}; {found['versions']}.",
        f"{found['clock']}, medians of {found['rounds']} rounds by turns; {found['steps']} tiny steps a round, a fifth of that"
        " for steps of 5 ms.", "",
        "| step | by hand, µs | Trainer, µs | extra, µs | of a 5 ms step |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for name, row in found["rows"].items():
        numbers = " | ".join(f"{row[key]:.0f}" for key in ("by_hand_us", "trainer_us", "extra_us"))
        lines.append(f"| {name} | {numbers} | {row['extra_of_5_ms']:.2%} |")
    kept = "kept" if found["rows"]["tiny"]["extra_of_5_ms"] <= LIMIT else "**not kept**"
    limit = f"{LIMIT:.0%} of a 5 ms step, {STEP_S * LIMIT * 1e6:.0f} µs, for the tiny step, where nothing hides it"
    lines += ["", f"Limit: {limit}: {kept}."]
    return "\n".join([*lines, ""])


def main() -> None:
    """Time both sizes and write the page, which says whether the limit is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for trainer_overhead.json and .md")
    given = parser.parse_args()
    cpu = given.device == "cpu"
    if cpu:
        torch.set_num_threads(1)
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        rows["tiny"] = measure(folder, partial(seeded, Scored), given.steps, given.rounds, cpu)
        large = five_ms_model(folder, cpu, time.process_time if cpu else synchronised)
        rows["about 5 ms"] = measure(folder, large, max(given.steps // 5, 10), given.rounds, cpu)
    found = {
        "device": "CPU, one thread" if cpu else torch.cuda.get_device_name(), "versions": ", ".join(f"{k} {v}" for k, v in versions(given.device).items()),
        "clock": "Processor time" if cpu else "By the clock", "steps": given.steps, "rounds": given.rounds, "rows": rows,
    }  # fmt: skip
    record("trainer_overhead", given.device, found, page(found), found.get("versions"), given.out)


if __name__ == "__main__":
    main()
