"""What a `gather` costs on two gloo ranks: torch's own collective, Accelerate's and hasten's, in turns.

    python benchmarks/gather.py

hasten's checks that every rank brings the same operation, structure, shapes and dtypes; torch's does not. By the clock,
on two processes that talk over the loopback device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loading import versions
from measuring import on_two_ranks
from recording import RESULTS, record
from torch import Tensor

TURN = 50
SHAPES = {"one number": ()} | {f"{n:,} numbers": (n,) for n in (32, 128, 1024, 4096, 16384, 65536, 262_144, 1_048_576)}


def contenders() -> dict[str, Callable[[Tensor], Tensor]]:
    from hasten import Accelerator

    size = dist.get_world_size()

    def by_torch(x: Tensor) -> Tensor:
        row = x.reshape(1) if x.ndim == 0 else x
        parts = [torch.empty_like(row) for _ in range(size)]
        dist.all_gather(parts, row)
        return torch.cat(parts)

    found: dict[str, Callable[[Tensor], Tensor]] = {"torch": by_torch}
    found["hasten"] = Accelerator(cpu=True).gather
    try:
        from accelerate import Accelerator as Original
    except ImportError:
        return found
    if "hasten" not in getattr(sys.modules["accelerate"], "__version__", ""):
        found["Accelerate"] = Original(cpu=True).gather
    return found


def measure(rounds: int) -> list[dict[str, Any]]:
    """One row a shape: median microseconds of a call on this rank."""
    gathers = contenders()
    names = list(gathers)
    rows = []
    for label, shape in SHAPES.items():
        x = torch.full(shape, float(dist.get_rank()))
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(rounds + 2):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                gather = gathers[name]
                dist.barrier()
                begun = time.perf_counter()
                for _ in range(TURN):
                    gather(x)
                if turn >= 2:
                    times[name].append((time.perf_counter() - begun) / TURN * 1e6)
        middle = {name: statistics.median(values) for name, values in times.items()}
        rows.append({"what": label, **{name: {"µs": m, "ratio": m / middle["torch"]} for name, m in middle.items()}})
    return rows


def worker(rounds: int) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = measure(rounds)
    if dist.get_rank() == 0:
        print(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    rounds = 4 if args.quick else args.rounds
    if args.worker:
        worker(rounds)
        return
    rows = on_two_ranks(__file__, "--rounds", str(rounds))
    known = versions()
    names = [name for name in rows[0] if name != "what"]
    lines = ["# A gather on two gloo ranks", "", ", ".join(f"{k} {v}" for k, v in known.items()), ""]
    lines += ["| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for row in rows:
        cells = [f"{row[name]['µs']:.0f} µs (× {row[name]['ratio']:.2f})" for name in names]
        lines.append(f"| {row['what']} | " + " | ".join(cells) + " |")
    record("gather", "cpu", {"rows": rows}, "\n".join(lines), known, args.out)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
