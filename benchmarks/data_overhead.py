"""What a prepared loader adds to a batch on the CPU: side by side with a bare DataLoader, Accelerate and Fabric.

    python benchmarks/data_overhead.py [--quick]

The contenders take turns reading whole epochs of the same 16,000 rows in one process: processor time of that process, or
wall time where workers read. Beginning an epoch (up to its first batch) is part of that, and told beside it as well, because
short epochs feel it more.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from loading import prepared_by_all, report, summary, take_turns
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset[dict[str, Any]]):
    """Samples as training sets have them: a vector and a label."""

    def __init__(self, size: int, width: int) -> None:
        self.x = torch.randn(size, width)
        self.y = torch.randint(10, (size,))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "y": self.y[index]}


CASES = {
    "batches of 32 x 64, shuffled": {"batch_size": 32, "shuffle": True},
    "batches of 4 x 64, shuffled": {"batch_size": 4, "shuffle": True},
    "batches of 32 x 64, in order": {"batch_size": 32},
    "batches of 32 x 64, shuffled, 2 workers": {"batch_size": 32, "shuffle": True, "num_workers": 2},
}


def reading(loader: Iterable[Any]) -> Callable[[], int]:
    def read() -> int:
        return sum(1 for _ in loader)

    return read


def starting(loader: Iterable[Any]) -> Callable[[], int]:
    def start() -> int:
        next(iter(loader))
        return 1

    return start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    rows = []
    data = Rows(16_000, 64)
    for name, settings in CASES.items():
        workers = bool(settings.get("num_workers"))

        def make(settings: dict[str, Any] = settings, workers: bool = workers) -> DataLoader[Any]:
            return DataLoader(data, **settings, persistent_workers=workers)

        loaders = prepared_by_all(make, torch.device("cpu"))
        clock = time.perf_counter if workers else time.process_time
        rounds = 6 if args.quick else 40
        times = take_turns({n: reading(loader) for n, loader in loaders.items()}, rounds, clock)
        begun: dict[str, Any] = {}
        if not workers:
            begun = summary(take_turns({n: starting(loader) for n, loader in loaders.items()}, 10 * rounds, clock))
        row: dict[str, Any] = {"case": name}
        for contender, numbers in summary(times).items():
            row[f"{contender} µs a batch"] = numbers["milliseconds"] * 1e3
            row[f"{contender} ratio"] = numbers["ratio"]
            if contender in begun:
                row[f"{contender} µs to the first"] = begun[contender]["milliseconds"] * 1e3
        rows.append(row)
    report("data_overhead", "Cost of a batch on the CPU", rows)


if __name__ == "__main__":
    main()
