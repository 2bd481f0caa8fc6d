"""Dispatching loaders on gloo ranks: one rank reads, every rank receives its part. Side by side with Accelerate.

    python benchmarks/dispatch.py [--ranks 2 4] [--quick]

Both contenders run in the same processes and take turns; a turn is a pass over the same data.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from loading import report
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Made(Dataset[dict[str, Any]]):
    """Batches that cost nothing to make: the loader's own work is what is measured."""

    def __init__(self, rows: int, shape: tuple[int, ...], steps: int) -> None:
        self.batch = {"x": torch.randn(rows, *shape), "y": torch.randint(10, (rows,))}
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.batch


class Streamed(IterableDataset[dict[str, Any]]):
    def __init__(self, made: Made) -> None:
        self.made = made

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.made[index] for index in range(self.made.steps))


CASES: dict[str, tuple[int, tuple[int, ...], int]] = {
    "32 x 512 floats (64 KiB) a rank": (32, (512,), 120),
    "32 x 3 x 64 x 64 floats (1.5 MiB) a rank": (32, (3, 64, 64), 40),
    "32 x 3 x 224 x 224 floats (18 MiB) a rank": (32, (3, 224, 224), 8),
}


def worker(args: argparse.Namespace) -> None:
    """One rank: every case, contenders in turn; rank 0 prints the times."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    from hasten import Accelerator as Ours
    from hasten import DataLoaderConfiguration as OurSettings

    contenders: dict[str, Any] = {"hasten": Ours(cpu=True, dataloader_config=OurSettings(dispatch_batches=True))}
    try:
        from accelerate import Accelerator as Theirs
        from accelerate.utils import DataLoaderConfiguration as TheirSettings

        contenders["Accelerate"] = Theirs(cpu=True, dataloader_config=TheirSettings(dispatch_batches=True))
    except ImportError as error:
        print(f"Accelerate left out: {error}", file=sys.stderr)
    found = []
    for name, (rows, shape, steps) in CASES.items():
        loaders = {}
        for contender, accelerator in contenders.items():
            made = Made(rows, shape, steps * int(os.environ["WORLD_SIZE"]))
            loaders[contender] = accelerator.prepare(DataLoader(Streamed(made), batch_size=None))
        times: dict[str, list[float]] = {contender: [] for contender in loaders}
        for turn in range((3 if args.quick else 7) + 1):
            for contender, loader in loaders.items():
                torch.distributed.barrier()
                begun = time.perf_counter()
                count = sum(1 for _ in loader)
                torch.distributed.barrier()
                if turn:
                    times[contender].append((time.perf_counter() - begun) / count * 1e3)
        found.append((name, {contender: statistics.median(spent) for contender, spent in times.items()}))
    if os.environ["RANK"] == "0":
        print(json.dumps(found))


def run(ranks: int, quick: bool) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = []
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = {**os.environ, "OMP_NUM_THREADS": "1", **{key: str(value) for key, value in place.items()}}
        command = [sys.executable, __file__, "--worker", *["--quick"] * quick]
        workers.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in workers]
    assert not any(process.returncode for process in workers), "a rank failed; its error is above"
    rows = []
    for name, spent in json.loads(outputs[0].splitlines()[-1]):
        row: dict[str, Any] = {"ranks": ranks, "batch": name}
        row |= {f"{contender} ms a step": value for contender, value in spent.items()}
        if "Accelerate" in spent:
            row["times faster"] = spent["Accelerate"] / spent["hasten"]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    report("dispatch", "Dispatching loaders", [row for ranks in args.ranks for row in run(ranks, args.quick)])


if __name__ == "__main__":
    main()
