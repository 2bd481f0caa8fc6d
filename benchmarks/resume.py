"""How long a loader takes to go on at batch one million, with and without workers, beside reading up to there.

python benchmarks/resume.py
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from loading import report
from torch.utils.data import DataLoader

from hasten import Accelerator, skip_first_batches

BATCH = 8
TARGET = 1_000_000


def make(num_workers: int) -> Any:
    user: DataLoader[Any] = DataLoader(range(10**10), batch_size=BATCH, shuffle=True, num_workers=num_workers)  # type: ignore[arg-type]
    return Accelerator(cpu=True).prepare(user)


def first_batch_after(begin: Any) -> float:
    """Milliseconds until the first batch is there."""
    begun = time.perf_counter()
    iterator = iter(begin())
    next(iterator)
    return (time.perf_counter() - begun) * 1e3


def measured(num_workers: int) -> dict[str, Any]:
    fresh, resumed, skipped = [], [], []
    for _ in range(5):
        loader = make(num_workers)
        fresh.append(first_batch_after(lambda loader=loader: loader))
        state = {**loader.state_dict(), "epoch": 0, "consumed": TARGET * BATCH}
        loader = make(num_workers)
        loader.load_state_dict(state)
        resumed.append(first_batch_after(lambda loader=loader: loader))
        loader = make(num_workers)
        skipped.append(first_batch_after(lambda loader=loader: skip_first_batches(loader, TARGET)))
    begun = time.perf_counter()
    loader = make(num_workers)
    for count, _ in enumerate(loader):
        if count == 2000:
            break
    reading = (time.perf_counter() - begun) / 2000 * TARGET
    return {
        "workers": num_workers,
        "first batch of an epoch (ms)": statistics.median(fresh),
        "first batch after load_state_dict at batch 1,000,000 (ms)": statistics.median(resumed),
        "after skip_first_batches(1,000,000) (ms)": statistics.median(skipped),
        "reading up to there would take (s)": reading,
    }


def main() -> None:
    torch.set_num_threads(1)
    report("resume", "Going on at batch one million", [measured(num_workers) for num_workers in (0, 2)])


if __name__ == "__main__":
    main()
