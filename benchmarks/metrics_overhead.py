"""What metrics for operations cost a training step: the same loop with and without them, interleaved.

    python benchmarks/metrics_overhead.py

Processor time of the training thread, so that a busy machine changes it less: single steps of two Accelerators in one process
alternate, and the median of the differences of neighbours, with its interval of 95 % confidence, is divided by a step of 5 ms. What happens
once a second is measured by itself and added by its share of a second: on a busy machine a step takes longer by the clock, and would contain
more of it. The calls that metrics add to a step are timed one by one within the loop as well. The scrape is timed by itself: it runs in another
thread, and shares the interpreter with the training.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import torch
from recording import record
from torch.utils.data import DataLoader, TensorDataset

from hasten import Accelerator
from hasten.accelerator.operations import SampledScalars
from hasten.tracking.run_log import RunLog

STEP_US = 5000.0
SCRAPE_EVERY_S = 15.0


class Loop:
    """A small training, run in blocks of steps."""

    def __init__(self, **settings: Any) -> None:
        self.accelerator = Accelerator(cpu=True, trust="off", **settings)
        torch.manual_seed(0)
        model: Any = torch.nn.Linear(8, 8)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
        data: Any = DataLoader(TensorDataset(torch.randn(1 << 14, 8)), batch_size=8)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, data)
        self.left = 0
        self.matrix = torch.randn(256, 256) / 16

    def work(self) -> None:
        """Compute for about five milliseconds, as a step's kernels do: what follows finds the caches of the processor cold."""
        product = self.matrix
        for _ in range(8):
            product = product @ self.matrix

    def block(self, steps: int) -> float:
        """Run some steps; returns the microseconds of processor time of one, without its work."""
        if self.left < steps:
            self.batches, self.left = iter(self.loader), len(self.loader) - 1
            next(self.batches)
        batches, self.left, work = self.batches, self.left - steps, 0.0
        began = time.thread_time()
        for _ in range(steps):
            (x,) = next(batches)
            before = time.thread_time()
            self.work()
            work += time.thread_time() - before
            self.accelerator.backward(self.model(x).square().mean())
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return (time.thread_time() - began - work) / steps * 1e6


def added(steps: int, rounds: int, second_us: float, **common: Any) -> dict[str, float]:
    """Return the microseconds of a step without and with metrics, and the median difference of neighbouring blocks."""
    plain, served = Loop(**common), Loop(**common, metrics={"port": 0})
    metrics, log = served.accelerator._metrics, served.accelerator._run_log
    assert metrics is not None
    assert log is not None
    log.every_second = None
    for loop in (plain, served):
        loop.block(steps + 100)
    assert not metrics.sampled.loss_due, "the values of once a second are not sampled in this loop"
    pairs = []
    for number in range(rounds):
        order = (plain, served) if number % 2 else (served, plain)
        took = {id(loop): loop.block(steps) for loop in order}
        pairs.append((took[id(plain)], took[id(served)]))
    differences = sorted(after - before for before, after in pairs)
    difference, reach = statistics.median(differences), 0.98 * math.sqrt(rounds)  # of the ranks around the median
    low, high = differences[int(rounds / 2 - reach)], differences[int(rounds / 2 + reach)]
    share = (difference + second_us * STEP_US / 1e6) / STEP_US
    found = {
        "without": statistics.median(before for before, _ in pairs),
        "with": statistics.median(after for _, after in pairs),
        "added": difference,
        "added, from": low,
        "added, to": high,
        "share of 5 ms": share,
    }
    for loop in (plain, served):
        loop.accelerator.end_training()
    return {name: round(value, 6) for name, value in found.items()}


def once_a_second(rounds: int) -> float:
    """Return the microseconds of what happens once a second: both values are sampled, and the times are noted."""
    log, seen, loss = RunLog(None, 0, dict, lambda: None), SampledScalars(torch.device("cpu")), torch.tensor(1.0)
    log.asked()
    took = []
    for _ in range(rounds):
        torch.randn(1 << 20).sum()  # as cold as within a step
        seen.request()
        began = time.thread_time()
        seen.see("loss", loss)
        seen.see("grad_norm", loss)
        log._commit(time.perf_counter() + 10.0)
        took.append((time.thread_time() - began) * 1e6)
    return statistics.median(took)


def in_place(steps: int) -> dict[str, float]:
    """Return the microseconds of the calls that metrics add to a step: each one timed within the loop, by its median."""
    loop, took = Loop(metrics={"port": 0}), dict[str, list[float]]()

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        times = took.setdefault(name, [])

        def calling(*given: Any) -> None:
            began = time.perf_counter()
            call(*given)
            times.append(time.perf_counter() - began)

        return calling

    log = loop.accelerator._run_log
    assert log is not None
    log.every_second = None
    for name in ("asked", "got", "optimizer_done"):
        setattr(log, name, timed(name, getattr(log, name)))
    loop.block(steps)
    loop.accelerator.end_training()
    each = {name: statistics.median(times) * len(times) / steps * 1e6 for name, times in took.items()}
    return {name: round(value, 3) for name, value in {**each, "added": sum(each.values())}.items()}


def scraping(rounds: int) -> dict[str, float]:
    """Return the microseconds of processor time that a scrape takes from the process, with its request."""
    loop = Loop(metrics={"port": 0})
    loop.block(100)
    metrics = loop.accelerator._metrics
    assert metrics is not None
    assert metrics.server is not None
    url = f"http://127.0.0.1:{metrics.server.port}/metrics"
    began = time.thread_time()
    for _ in range(rounds):
        metrics.text()
    text = (time.thread_time() - began) / rounds * 1e6
    whole = []
    for _ in range(rounds):
        before = time.process_time() - time.thread_time()  # of all threads but this one, the client
        with urllib.request.urlopen(url) as answer:
            answer.read()
        whole.append(time.process_time() - time.thread_time() - before)
    loop.accelerator.end_training()
    request = statistics.median(whole) * 1e6
    return {"text": round(text, 1), "request": round(request, 1), "share": round(request / (SCRAPE_EVERY_S * 1e6), 8)}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=1)
    options.add_argument("--rounds", type=int, default=6001)
    given = options.parse_args()
    torch.set_num_threads(1)
    second_us = once_a_second(101)
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {
            "without project_dir": added(given.steps, given.rounds, second_us),
            "with project_dir": added(given.steps, given.rounds, second_us, project_dir=folder),
            "in place": in_place(1500),
            "once a second": round(second_us, 1),
            "scrape": scraping(200),
        }
    lines = [
        "| run | step without, µs | step with metrics, µs | added, µs (95 % confidence) | share of a 5 ms step |",
        "|---|---|---|---|---|",
    ]
    for name in ("without project_dir", "with project_dir"):
        row = found[name]
        lines.append(
            f"| {name} | {row['without']:.1f} | {row['with']:.1f} | {row['added']:.1f} ({row['added, from']:.1f} to "
            f"{row['added, to']:.1f}) | {row['share of 5 ms']:.3%} |"
        )
    added_us = found["in place"]["added"]
    share = (added_us + second_us * STEP_US / 1e6) / STEP_US
    lines.append(f"| the added calls, each timed within the loop | | | {added_us:.1f} | {share:.3%} |")
    found["share of 5 ms"] = round(share, 6)
    scrape = found["scrape"]
    lines.append(
        f"\nOnce a second: {second_us:.0f} µs, added to the share. A scrape takes {scrape['request']:.0f} µs of the process ({scrape['text']:.0f} µs to read and render), {scrape['share']:.4%} of the time "
        f"at one scrape every {SCRAPE_EVERY_S:.0f} s."
    )
    page = "\n".join(lines)
    print(page)
    record(
        "metrics_overhead",
        f"{given.steps} steps, {given.rounds} rounds",
        found,
        page,
        {"torch": str(torch.__version__)},
    )


if __name__ == "__main__":
    main()
