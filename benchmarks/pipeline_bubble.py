"""The share of a step in which pipeline ranks wait, schedule by schedule, beside its formula: four gloo ranks.

    python benchmarks/pipeline_bubble.py

Blocks do not compute but sleep, equally long in forward, in the gradient of their input and in the gradient of their
weights, so that four ranks do not compete for the cores of a small machine. What a rank is busy with is then known, and
the rest of the step by the clock is bubble, messages and Python. The formula counts the bubble alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from loading import versions
from recording import record
from torch import Tensor, nn

from hasten import Accelerator, ParallelismConfig, PipelineParallelConfig
from hasten.strategies.pipeline.stage_plan import bubble
from hasten.testing.pool import Pool

RANKS = 4
BLOCKS = 8
SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "loop_bfs": 2,
    "interleaved_1f1b": 2,
    "interleaved_zero_bubble": 2,
    "zbv_zero_bubble": 2,
}


class Rest(torch.autograd.Function):
    """Sleeps in the chosen directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forth_s: float, back_s: float) -> Tensor:
        ctx.back_s = back_s
        time.sleep(forth_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.back_s)
        return grads[0], None, None


class SleepyBlock(nn.Module):
    """A block whose forward, input gradient and weight gradient take the same time each."""

    def __init__(self, unit_s: float) -> None:
        super().__init__()
        self.unit_s = unit_s
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        rested = Rest.apply(x, self.unit_s, self.unit_s)
        return rested * Rest.apply(self.weight, 0.0, self.unit_s)


def measure(ctx: Any, schedule: Any, micro_batches: int, unit_s: float, rounds: int) -> float:
    """The share of the step in which this rank is not busy, in the step that was disturbed least."""
    handler = PipelineParallelConfig(schedule=schedule, num_microbatches=micro_batches)
    accelerator = Accelerator(parallelism_config=ParallelismConfig(pp_size=RANKS, pp_handler=handler))
    model = accelerator.prepare_model(nn.Sequential(*(SleepyBlock(unit_s) for _ in range(BLOCKS))))
    batch = torch.ones(micro_batches, 4)
    busy_s = 3 * unit_s * micro_batches * BLOCKS / RANKS
    shares = []
    for turn in range(rounds + 1):
        dist.barrier()
        begun = time.perf_counter()
        accelerator.forward_backward(model, batch, lambda net, x: net(x).mean())
        if turn:  # the first learns the shapes
            shares.append(1 - busy_s / (time.perf_counter() - begun))
    return min(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unit_ms", type=float, default=40.0, help="what a third of a block's work takes")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--micro_batches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    args = parser.parse_args()
    rounds = 2 if args.quick else args.rounds
    rows = []
    with Pool() as pool:
        for schedule, per_rank in SCHEDULES.items():
            for micro_batches in (8,) if args.quick else args.micro_batches:
                shares = pool.run(measure, RANKS, schedule, micro_batches, args.unit_ms / 1e3, rounds)
                expected = bubble(schedule, RANKS, micro_batches, per_rank)  # type: ignore[arg-type]  # a schedule's name
                rows.append((schedule, per_rank, micro_batches, statistics.mean(shares), expected))
                print(
                    f"{schedule} x {micro_batches}: {rows[-1][3]:.1%} measured, {expected:.1%} by the formula",
                    flush=True,
                )
    setup = ", ".join(f"{key} {value}" for key, value in versions().items())
    lines = [
        "# Pipeline bubbles on four gloo ranks",
        "",
        f"Blocks that sleep {args.unit_ms:g} ms for each of forward, input gradient and weight gradient; {rounds} steps each; {setup}.",
        "",
        "| schedule | stages per rank | micro-batches | not busy, least of the steps | bubble, formula |",
        "|---|---|---|---|---|",
        *(f"| {name} | {v} | {m} | {got:.1%} | {want:.1%} |" for name, v, m, got, want in rows),
    ]
    record("pipeline_bubble", "cpu", rows, "\n".join(lines), versions())


if __name__ == "__main__":
    main()
