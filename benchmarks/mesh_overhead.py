"""What the code of tensor and context parallelism costs on one device: a GPT-2-small-sized model in bf16.

    python benchmarks/mesh_overhead.py --device cuda             # one GPU, about two minutes
    python benchmarks/mesh_overhead.py --quick                   # a tiny model, to see that it runs

A world of one has nobody to exchange with, so what is left is the code around the exchanges: layers split over one rank with
their replaced forwards and sharded parameters, batches sharded over one rank, attention by way of blocks. One rank would skip
all of it; here it is made to take the path of many. Every contender takes its turn in each round; the ratio is the median of
the rounds' ratios to the plain loop of the same round. Results go to benchmarks/results (or --out) as JSON and Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from recording import RESULTS, record
from sharding import TARGET, TINY, WARM_UP, Size, Step, Writer, facts, seconds
from torch import nn

from hasten import Accelerator, ParallelismConfig, TorchContextParallelConfig
from hasten.accelerator import setup
from hasten.comm.process_group import ProcessGroupComm
from hasten.config.root import Config
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh import WorldMesh, device_mesh
from hasten.strategies.base import Caps, Strategy
from hasten.strategies.context.strategy import ContextParallel
from hasten.strategies.native import NativeStrategy
from hasten.strategies.placing import Convert
from hasten.strategies.tensor.alone import TensorParallelOnly
from hasten.strategies.tensor.strategy import SplitLayers

SMALL = Size(vocab=50304, width=768, heads=12, depth=12, context=1024, rows=16)
PLAN = {
    "embed": "embedding_rowwise",
    "blocks.*.qkv": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}
WAYS = ("allgather", "ulysses")


# -- the contenders ---------------------------------------------------------------------------------------------------
def trained(accelerator: Accelerator, size: Size, lose: Callable[[nn.Module, torch.Tensor], None]) -> Step:
    """One training step as a function; `lose` runs forward and backward."""
    torch.manual_seed(0)
    with accelerator.device:
        net: nn.Module = Writer(size)
        tokens = torch.randint(0, size.vocab, (size.rows, size.context))
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-4))

    def step() -> None:
        lose(net, tokens)
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain(size: Size, cpu: bool) -> Step:
    accelerator = Accelerator(mixed_precision="bf16", cpu=cpu, strategy="none")
    return trained(accelerator, size, lambda net, tokens: accelerator.backward(net(tokens)))


@contextmanager
def split_by_force() -> Iterator[None]:
    """A block in which an Accelerator splits layers although only one rank shares them."""

    def split(config: Config, ctx: ProcessContext) -> Strategy:
        layers = SplitLayers(config.parallelism, config.fsdp, WorldMesh())
        transforms = [Convert(config.master_weights), layers]
        return NativeStrategy("tensor", TensorParallelOnly(config.fsdp), transforms, Caps(sharded_state=True))

    chosen = vars(setup)["choose"]
    vars(setup)["choose"] = split
    try:
        yield
    finally:
        vars(setup)["choose"] = chosen


def tensor_parallel(size: Size, cpu: bool) -> Step:
    with split_by_force():
        sizes = ParallelismConfig(tp_plan=PLAN)
        accelerator = Accelerator(mixed_precision="bf16", cpu=cpu, parallelism_config=sizes)
    return trained(accelerator, size, lambda net, tokens: accelerator.backward(net(tokens)))


def context_parallel(size: Size, cpu: bool, way: Any) -> Step:  # Any: one of WAYS
    accelerator = Accelerator(mixed_precision="bf16", cpu=cpu, strategy="none")
    device_mesh(accelerator.ctx.mesh, accelerator.device)  # starts the process group of one
    settings = TorchContextParallelConfig(cp_comm_strategy=way)
    blocks = ContextParallel(settings, accelerator.ctx, accelerator._clock, lambda: ())
    group = dist.distributed_c10d._get_default_group()
    blocks._comm = ProcessGroupComm(group, dist.HashStore(), accelerator.device)  # one rank would go without

    def lose(net: nn.Module, tokens: torch.Tensor) -> None:
        with blocks.block([tokens], [1]):
            accelerator.backward(net(tokens))

    return trained(accelerator, size, lose)


def contenders() -> dict[str, Callable[[Size, bool], Step]]:
    def along(way: str) -> Callable[[Size, bool], Step]:
        return lambda size, cpu: context_parallel(size, cpu, way)

    return {
        "plain": plain,
        "tensor parallel": tensor_parallel,
        **{f"context parallel, {way}": along(way) for way in WAYS},
        "plain, again": plain,  # what two builds of the same loop differ by
    }


# -- measuring and reporting ------------------------------------------------------------------------------------------
def measure(size: Size, cpu: bool, rounds: int, times: int) -> list[dict[str, Any]]:
    """Each contender's milliseconds and its ratio to plain, taking turns; every other round in reverse order."""
    steps = {name: make(size, cpu) for name, make in contenders().items()}
    for step in steps.values():
        seconds(step, WARM_UP if rounds > 2 else 1, cpu)
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name in list(steps)[:: -1 if number % 2 else 1]:
            taken[name].append(seconds(steps[name], times, cpu))
    rows: list[dict[str, Any]] = []
    for name, spent in taken.items():
        ratios = [mine / base for mine, base in zip(spent, taken["plain"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append({"row": name, "ms": 1e3 * statistics.median(spent), "ratio": middle, "quartiles": [low, high]})
    return rows


def markdown(known: dict[str, Any], rows: list[dict[str, Any]], rounds: int, times: int) -> str:
    over = [row["row"] for row in rows if row["ratio"] > TARGET]
    judged = f"over the target for a GPU of × {TARGET}: {', '.join(over)}" if over else f"all within × {TARGET}"
    lines = [
        "# The code of tensor and context parallelism on one device",
        "",
        ", ".join(f"{key} {value}" for key, value in known.items()),
        "",
        f"Taking turns, {rounds} rounds of {times} steps; {judged}.",
        "",
        "| | ms a step | × plain | quartiles |",
        "|---|---|---|---|",
        *(
            f"| {row['row']} | {row['ms']:.2f} | {row['ratio']:.3f} | {row['quartiles'][0]:.3f} to {row['quartiles'][1]:.3f} |"
            for row in rows
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a tiny model, two rounds of one step, no file")
    parser.add_argument("--out", type=Path, default=None, help="folder for mesh_overhead.json and .md")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=6, help="steps of a round")
    args = parser.parse_args()
    cpu = args.device == "cpu"
    size = TINY if cpu or args.quick else SMALL
    rounds, times = (2, 1) if args.quick else (args.rounds, args.steps)
    known = facts(size, cpu)
    began = time.perf_counter()
    rows = measure(size, cpu, rounds, times)
    known["seconds"] = round(time.perf_counter() - began)
    text = markdown(known, rows, rounds, times)
    print(text)
    out = args.out if args.out is not None or cpu or args.quick else RESULTS
    if out is not None:
        found = {"facts": known, "rounds": rounds, "steps_per_round": times, "table": rows}
        record("mesh_overhead", args.device, found, text, folder=out)
    with suppress(ValueError):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
