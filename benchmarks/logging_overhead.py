"""What logging and progress add to a 5 ms training step: the same loop bare, with `log`, with `progress`, with both.

The step is a chain of matrix products of about that length. Two clocks run: the wall clock over the whole loop, and the
processor time of the training thread outside the step, which does not depend on what else the machine does but leaves out
what the helper threads take from the step. On an accelerator the host waits, so only the wall clock says something there.
Rounds of the variants alternate, in another order each time; each is compared with the bare loop of its own round.

    python benchmarks/logging_overhead.py --log_with jsonl --log_with tensorboard --out benchmarks/results
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from recording import record
from rich.console import Console

from hasten import Accelerator

Step = Callable[[], torch.Tensor]
CLOCKS = ("wall", "thread")
VARIANTS = {"bare": (False, False), "log": (True, False), "progress": (False, True), "both": (True, True)}


@dataclass(frozen=True)
class Times:
    """Seconds per step of one round."""

    wall: float
    """Of the whole loop."""
    thread: float
    """Of the training thread's processor time, outside the step."""


def training_step(device: torch.device, target_s: float) -> Step:
    """A step that takes about `target_s` and returns a loss on `device`, without waiting for the device."""
    size = 256 if device.type == "cpu" else 2048
    matrix = torch.randn(size, size, device=device) / size**0.5  # products neither grow nor shrink to slow tiny numbers

    def chain(times: int) -> torch.Tensor:
        product = matrix
        for _ in range(times):
            product = product @ matrix
        return product.mean()

    def seconds(times: int) -> float:
        settle(device)
        began = time.perf_counter()
        chain(times)
        settle(device)
        return time.perf_counter() - began

    seconds(100)
    times = max(1, round(target_s / min(seconds(100) for _ in range(10)) * 100))
    return lambda: chain(times)


def loop(accelerator: Accelerator, step: Step, steps: int, log: bool, show: bool, terminal: bool) -> Times:
    """One round."""
    batches = [{"input_ids": torch.zeros(8, 128, dtype=torch.long)}] * steps
    console = Console(stderr=True, force_terminal=terminal)
    bar = accelerator.progress(batches, desc="train", console=console) if show else None
    inside = 0.0
    settle(accelerator.device)
    began, thread_began = time.perf_counter(), time.thread_time()
    for index, _ in enumerate(bar or batches):
        before = time.thread_time()
        loss = step()
        inside += time.thread_time() - before
        if bar is not None:
            bar.show(loss=loss)
        if log:
            accelerator.log({"loss": loss, "lr": 1e-4}, step=index)
    settle(accelerator.device)
    wall, thread = time.perf_counter() - began, time.thread_time() - thread_began
    return Times(wall / steps, (thread - inside) / steps)


def settle(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def measure(accelerator: Accelerator, step: Step, args: argparse.Namespace) -> dict[str, list[Times]]:
    """The rounds of each variant; one round beforehand is not counted."""
    found: dict[str, list[Times]] = {name: [] for name in VARIANTS}
    names = list(VARIANTS)
    for number in range(args.rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            log, show = VARIANTS[name]
            times = loop(accelerator, step, args.steps, log, show, args.terminal)
            if number:
                found[name].append(times)
    return found


def added(found: dict[str, list[Times]], name: str, clock: str) -> dict[str, float]:
    """What a variant adds to a bare step of its round: median, and the quarters' bounds, in microseconds and percent."""
    pairs = list(zip(found[name], found["bare"], strict=True))
    differences = sorted(1e6 * (getattr(here, clock) - getattr(bare, clock)) for here, bare in pairs)
    low, _, high = statistics.quantiles(differences, n=4) if len(differences) > 1 else differences * 3
    step_us = 1e6 * statistics.median(bare.wall for bare in found["bare"])
    middle = statistics.median(differences)
    return {"us": middle, "us_low": low, "us_high": high, "percent": 100 * middle / step_us}


def surroundings(device: torch.device) -> dict[str, str]:
    """Hardware and versions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = next(names, platform.processor() or platform.machine())
    return {
        "hardware": torch.cuda.get_device_name() if device.type == "cuda" else processor,
        "cores": str(os.cpu_count()),
        "load": f"{os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hasten": version("hasten"),
        "rich": version("rich"),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def table(result: dict[str, Any]) -> str:  # Any: JSON
    """The result as a page."""
    known = ", ".join(f"{name} {value}" for name, value in result["surroundings"].items())
    rows = []
    for name in list(VARIANTS)[1:]:
        cells = [result["added"][clock][name] for clock in CLOCKS]
        numbers = (f"{c['us']:+.1f} ({c['us_low']:+.1f} to {c['us_high']:+.1f}) | {c['percent']:+.2f} %" for c in cells)
        rows.append(f"| {name} | {' | '.join(numbers)} |")
    return "\n".join(
        [
            f"# What logging and progress add to a step of {result['step_ms']:.2f} ms on {result['device']}",
            "",
            f"{known}; trackers {', '.join(result['trackers'])}; {result['rounds']} rounds of {result['steps']} steps.",
            "",
            "Medians, and the bounds of the middle half of the rounds. *Wall*: the whole loop. *Thread*: processor time of the",
            "training thread outside the step, as a share of the same step.",
            "",
            "| | wall µs a step | wall | thread µs a step | thread |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    """Measure, print the page, and write it with the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step_ms", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=400, help="steps of one round")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--log_with", action="append", help="trackers (default: jsonl)")
    parser.add_argument("--terminal", action="store_true", help="draw the bar as in a terminal, wherever stderr goes")
    parser.add_argument("--cpu", action="store_true", help="measure on the CPU although an accelerator is present")
    parser.add_argument("--out", type=Path, help="folder for a JSON file with the numbers and a page")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    names = args.log_with or ["jsonl"]
    with tempfile.TemporaryDirectory() as folder:
        accelerator = Accelerator(log_with=names, project_dir=folder, cpu=args.cpu)
        accelerator.init_trackers("overhead")
        found = measure(accelerator, training_step(accelerator.device, args.step_ms / 1e3), args)
        accelerator.end_training()
    result = {
        "device": str(accelerator.device),
        "surroundings": surroundings(accelerator.device),
        "trackers": names,
        "steps": args.steps,
        "rounds": args.rounds,
        "step_ms": 1e3 * statistics.median(times.wall for times in found["bare"]),
        "added": {clock: {name: added(found, name, clock) for name in list(VARIANTS)[1:]} for clock in CLOCKS},
    }
    print(table(result))
    if args.out:
        record("logging_overhead", accelerator.device.type, result, table(result), folder=args.out)


if __name__ == "__main__":
    main()
