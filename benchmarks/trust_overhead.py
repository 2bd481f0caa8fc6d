"""What the always-on watches cost in a whole loop.

    python benchmarks/trust_overhead.py                   # DDP on two gloo ranks, a small model with AdamW
    python benchmarks/trust_overhead.py --device cuda     # a group of one on the GPU, a tiny step

In a group of one the stall watch, the divergence check and the numbers watch all run as they do among many ranks.
Loops with and without them take turns of a hundred updates in one process, each round in another order. Shown are milliseconds of
the training thread's processor time for an update, so that a busy machine does not change them, and by the clock; a ratio is
that of medians, to the loops without any watch, of which there are two: how far they are apart is what a run cannot tell.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loading import versions
from measuring import on_two_ranks
from recording import RESULTS, record
from torch import nn
from torch.nn import functional as F

from hasten import Accelerator
from hasten.comm.process_group import ProcessGroupComm
from hasten.runtime.context import ProcessContext

TURN = 100
WIDTH, ROWS = 384, 256
OFF: dict[str, Any] = {"divergence": "off", "numbers": "off"}
VARIANTS: dict[str, dict[str, Any]] = {
    "nothing": OFF,
    "nothing, again": OFF,
    "divergence every 100": {"numbers": "off"},
    "divergence every 10": {"numbers": "off", "divergence_every": 10},
    "numbers=report": {"divergence": "off"},
    "numbers=stop": {"divergence": "off", "numbers": "stop"},
    "both, as by default": {},
}


def loop(
    settings: dict[str, Any], device: str = "cpu", rows: int = ROWS, context: ProcessContext | None = None
) -> Callable[[int], None]:
    """A training loop that runs so many updates when called."""
    accelerator = Accelerator(cpu=device == "cpu", trust=settings, context=context)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    x, y = torch.randn(rows, WIDTH, device=device), torch.randint(0, 10, (rows,), device=device)

    def run(updates: int) -> None:
        for _ in range(updates):
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    return run


def group_of_one(device: str) -> ProcessContext:
    """This process as the only rank of a real group, with the store that watches write to."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    alone = Accelerator(cpu=device == "cpu", trust=OFF).ctx
    assert dist.group.WORLD is not None
    return replace(alone, world=ProcessGroupComm(dist.group.WORLD, store, alone.device))


def measure_alone(rounds: int, device: str) -> dict[str, list[tuple[float, float]]]:
    """Turns of loops without any watch, and with those of a rank among others."""
    torch.set_num_threads(1)
    ctx, every = group_of_one(device), OFF | {"stall": "off"}
    loops = {
        "nothing": loop(every, device, 8, ctx),
        "nothing, again": loop(every, device, 8, ctx),
        "stall watch": loop({**OFF, "stall": "abort"}, device, 8, ctx),
        "divergence every 100": loop({**every, "divergence": "stop"}, device, 8, ctx),
        "numbers=report": loop({**every, "numbers": "report"}, device, 8, ctx),
        "all, as by default": loop({}, device, 8, ctx),
    }
    return turns(loops, rounds, torch.cuda.synchronize if device == "cuda" else lambda: None)


def measure(rounds: int) -> None:
    torch.set_num_threads(1)
    spent = turns({name: loop(settings) for name, settings in VARIANTS.items()}, rounds)
    if os.environ["RANK"] == "0":
        print(json.dumps(spent))


def turns(
    loops: dict[str, Callable[[int], None]], rounds: int, synchronize: Callable[[], None] = lambda: None
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each loop's turns: of the training thread's processor time, and by the clock."""
    for run in loops.values():
        run(120)
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    names = list(loops)
    gc.collect()
    gc.disable()  # a collection would land on whoever's turn it is
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            synchronize()
            cpu, clock = time.thread_time(), time.perf_counter()
            loops[name](TURN)
            synchronize()
            spent[name].append((time.thread_time() - cpu, time.perf_counter() - clock))
    gc.enable()
    return spent


def table(spent: dict[str, list[tuple[float, float]]]) -> str:
    """The rows, each beside the loop without any of it."""
    plain = [row for name, rows in spent.items() if name.startswith("nothing") for row in rows]
    lines = ["| loop | ms an update (processor) | ratio | by the clock | ratio |", "|---|---|---|---|---|"]
    for name, rows in spent.items():
        cells = [name]
        for which in (0, 1):
            taken, base = (statistics.median(row[which] for row in some) for some in (rows, plain))
            cells += [f"{taken / TURN * 1e3:.3f}", f"{taken / base:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--device", choices=["cpu", "cuda"], help="a group of one on this device")
    options.add_argument("--out", type=Path, default=RESULTS)
    options.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.worker:
        measure(given.rounds)
        return
    if given.device is None:
        print(table(on_two_ranks(__file__, "--rounds", str(given.rounds))))
        return
    spent, known = measure_alone(given.rounds, given.device), versions(given.device)
    title = (
        f"# Always-on watches in a group of one\n\n{', '.join(f'{key} {value}' for key, value in known.items())}\n\n"
    )
    about = f"{given.rounds} rounds of {TURN} updates of each loop in turns; ratios of medians.\n\n"
    record("trust_overhead", given.device, {"spent": spent}, title + about + table(spent), known, given.out)


if __name__ == "__main__":
    main()
