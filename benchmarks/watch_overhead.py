"""What the always-on stall watch costs, and what the checks of debug mode cost, on two gloo ranks.

    python benchmarks/watch_overhead.py

The record of a collective and one waking of the watchdog in processor time of the calling thread, so that a busy machine does not
change them; their share of a 5 ms step with ten collectives; and a small gather with and without debug mode's agreement by the clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hasten.comm.collective_log import CollectiveRecord
from hasten.comm.process_group import ProcessGroupComm
from hasten.trust.stall.observe import Observer

STEP_US, COLLECTIVES, TICKS_PER_S = 5000.0, 10, 1.0
EXTRA_GROUPS = 4


def timed(call: Callable[[], object], number: int, clock: Callable[[], float], rounds: int = 7) -> float:
    """Median microseconds of a call."""
    found = []
    for _ in range(rounds):
        start = clock()
        for _ in range(number):
            call()
        found.append((clock() - start) / number * 1e6)
    return statistics.median(found)


def deep(depth: int, call: Callable[[], float]) -> float:
    """Make the call from a deeper stack, as a training script does."""
    return call() if depth == 0 else deep(depth - 1, call)


def measure(rank: int, store: str, out: str, number: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{store}-group", 2), rank=rank, world_size=2)
    for _ in range(EXTRA_GROUPS):
        dist.new_group([0, 1])
    world = dist.group.WORLD
    assert world is not None
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port: list[Any] = [server.port if server else None]
    dist.broadcast_object_list(port)
    notes = server or dist.TCPStore("127.0.0.1", port[0], is_master=False)
    collectives, x = CollectiveRecord(), torch.ones(4)
    plain = ProcessGroupComm(world, notes, torch.device("cpu"), collectives=collectives)
    checked = ProcessGroupComm(world, notes, torch.device("cpu"), checked=True)
    observer = Observer(rank, collectives, lambda: 0)
    rows = {
        "record of a collective": deep(
            6, lambda: timed(lambda: collectives.note("all_reduce", x), number, time.thread_time)
        ),
        f"one waking, {1 + EXTRA_GROUPS} groups": timed(observer.counts, max(1, number // 10), time.thread_time),
        "all_gather": timed(lambda: plain.all_gather(x), number // 50, time.perf_counter),
        "all_gather under --debug": timed(lambda: checked.all_gather(x), number // 50, time.perf_counter),
    }
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--number", type=int, default=10_000)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/rows"
        mp.spawn(measure, (f"{folder}/store", out, given.number), nprocs=2)
        rows: dict[str, float] = json.loads(Path(out).read_text())
    note, waking, *_ = rows.values()
    share = (COLLECTIVES * note + waking * TICKS_PER_S * STEP_US / 1e6) / STEP_US
    print("| what | µs |\n|---|---|")
    for name, value in rows.items():
        print(f"| {name} | {value:.2f} |")
    print(f"\nshare of a 5 ms step with {COLLECTIVES} collectives: {100 * share:.3f} %")


if __name__ == "__main__":
    main()
