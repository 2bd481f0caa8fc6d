"""What logging and progress add to a 5 ms training step: the same loop bare, with `log`, with `progress`, with both.

The step is a chain of matrix products of about that length. On an accelerator wall time is compared. On the CPU the
processor time of the training thread outside the step is compared, so that the result does not depend on what else
the machine does. Rounds of the variants alternate; medians are compared.

    python benchmarks/logging_overhead.py --log_with jsonl --log_with tensorboard
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

from hasten import Accelerator

Step = Callable[[], torch.Tensor]


def training_step(device: torch.device, target_s: float) -> Step:
    """A step that takes about `target_s` and returns a loss on `device`, without waiting for the device."""
    size = 256 if device.type == "cpu" else 2048
    matrix = torch.randn(size, size, device=device)

    def chain(times: int) -> torch.Tensor:
        product = matrix
        for _ in range(times):
            product = product @ matrix * 1e-3
        return product.mean()

    chain(10)
    settle(device)
    began = time.perf_counter()
    chain(100)
    settle(device)
    times = max(1, round(target_s / (time.perf_counter() - began) * 100))
    return lambda: chain(times)


def loop(accelerator: Accelerator, step: Step, steps: int, log: bool, show: bool, terminal: bool) -> float:
    """Seconds per step of one round: outside the step on the CPU, all of them on an accelerator."""
    cpu = accelerator.device.type == "cpu"
    clock = time.thread_time if cpu else time.perf_counter
    batches = [{"input_ids": torch.zeros(8, 128, dtype=torch.long)}] * steps
    console = Console(stderr=True, force_terminal=terminal)
    bar = accelerator.progress(batches, desc="train", console=console) if show else None
    inside = 0.0
    settle(accelerator.device)
    began = clock()
    for index, _ in enumerate(bar or batches):
        before = clock()
        loss = step()
        inside += clock() - before
        if bar is not None:
            bar.show(loss=loss)
        if log:
            accelerator.log({"loss": loss, "lr": 1e-4}, step=index)
    settle(accelerator.device)
    return (clock() - began - (inside if cpu else 0.0)) / steps


def settle(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def main() -> None:
    """Measure and print one line per variant, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step_ms", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=400, help="steps of one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--log_with", action="append", help="trackers (default: jsonl)")
    parser.add_argument("--terminal", action="store_true", help="draw the bar as in a terminal, wherever stderr goes")
    parser.add_argument("--out", type=Path, help="folder for a JSON file with the numbers")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    names = args.log_with or ["jsonl"]
    with tempfile.TemporaryDirectory() as folder:
        accelerator = Accelerator(log_with=names, project_dir=folder)
        accelerator.init_trackers("overhead")
        step = training_step(accelerator.device, args.step_ms / 1e3)
        variants = {"bare": (False, False), "log": (True, False), "progress": (False, True), "both": (True, True)}
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(args.rounds):
            for name, (log, show) in variants.items():
                seconds[name].append(loop(accelerator, step, args.steps, log, show, args.terminal))
        accelerator.end_training()
    bare = statistics.median(seconds["bare"])
    found = {name: 1e6 * (statistics.median(times) - bare) for name, times in seconds.items()}
    percent = {name: added / (10 * args.step_ms) for name, added in found.items()}
    for name, added in found.items():
        print(f"{name:9s} {added:+8.1f} us a step  {percent[name]:+.2f} %")
    result = {
        "device": str(accelerator.device),
        "trackers": names,
        "step_ms": args.step_ms,
        "added_us": found,
        "added_percent": percent,
    }
    print(json.dumps(result))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "logging_overhead.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
