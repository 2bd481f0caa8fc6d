"""What the divergence check and the numbers watch cost in a whole loop: DDP on two gloo ranks, a small model with AdamW.

    python benchmarks/trust_overhead.py

Loops with and without them take turns of a hundred updates in one process. Shown are milliseconds of the training thread's processor
time for an update, so that a busy machine does not change them, and by the clock; a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from measuring import on_two_ranks
from torch import nn
from torch.nn import functional as F

from hasten import Accelerator

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


def loop(settings: dict[str, Any]) -> Callable[[int], None]:
    """A training loop that runs so many updates when called."""
    accelerator = Accelerator(cpu=True, **settings)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    x, y = torch.randn(ROWS, WIDTH), torch.randint(0, 10, (ROWS,))

    def run(updates: int) -> None:
        for _ in range(updates):
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    return run


def measure(rounds: int) -> None:
    torch.set_num_threads(1)
    loops = {name: loop(settings) for name, settings in VARIANTS.items()}
    for run in loops.values():
        run(20)
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, run in loops.items():
            cpu, clock = time.thread_time(), time.perf_counter()
            run(TURN)
            spent[name].append((time.thread_time() - cpu, time.perf_counter() - clock))
    if os.environ["RANK"] == "0":
        print(json.dumps(spent))


def table(spent: dict[str, list[tuple[float, float]]]) -> str:
    """The rows, each beside the loop without any of it."""
    plain = spent["nothing"]
    lines = ["| loop | ms an update (processor) | ratio | by the clock | ratio |", "|---|---|---|---|---|"]
    for name, rows in spent.items():
        cells = [name]
        for which in (0, 1):
            ratios = [row[which] / base[which] for row, base in zip(rows, plain, strict=True)]
            cells += [
                f"{statistics.median(row[which] for row in rows) / TURN * 1e3:.3f}",
                f"{statistics.median(ratios):.3f}",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.worker:
        measure(given.rounds)
        return
    print(table(on_two_ranks(__file__, "--rounds", str(given.rounds))))


if __name__ == "__main__":
    main()
