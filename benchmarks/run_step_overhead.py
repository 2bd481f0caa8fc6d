"""What run_step() costs over backward() alone: the same small step on several processes, in turns.

Run it with `hasten launch --cpu --num_processes 2 benchmarks/run_step_overhead.py`, with `--strategy fsdp` for FSDP2.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hasten import Accelerator

ROUNDS = 12
STEPS = 10


def main() -> None:
    """Print the median of a step with and without run_step()."""
    accelerator = Accelerator()
    net = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-3))
    x = torch.randn(64, 512, device=accelerator.device)

    def step(batch: Tensor) -> None:
        accelerator.backward(model(batch).pow(2).mean())

    def timed(run: Callable[[], object]) -> float:
        began = time.perf_counter()
        for _ in range(STEPS):
            run()
            optimizer.step()
            optimizer.zero_grad()
        return (time.perf_counter() - began) / STEPS * 1e3

    ways: dict[str, Callable[[], object]] = {
        "backward()": lambda: step(x),
        "run_step()": lambda: accelerator.run_step(step, x),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS):
        for name, run in ways.items():
            took = timed(run)
            if number:  # the first round warms up
                times[name].append(took)
    for name, found in times.items():
        accelerator.print(f"{accelerator.strategy:>7} {name}: {statistics.median(found):.2f} ms a step")


if __name__ == "__main__":
    main()
