"""What FSDP2 costs on one device, and what recompute and offload save: a GPT-2-medium-sized model in bf16.

    python benchmarks/sharding.py --device cuda                 # one GPU, about two minutes
    python benchmarks/sharding.py --device cpu                  # a tiny model, to see that it runs

First the plain run and FSDP2 in a world of one take turns, a few steps each, many rounds over: the ratio is the median of
the rounds' ratios, so that both see the same clock and temperature. Then every row runs alone, for its time and its peak
of device memory. Results go to benchmarks/results (or --out) as JSON and Markdown.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from recording import RESULTS, record_run
from torch import Tensor, nn
from torch.nn import functional as F

from hasten import Accelerator, FullyShardedDataParallelPlugin

TARGET = 1.03
WARM_UP = 8
"""Steps until memory of every stream has been taken; fewer leave the first rounds slow."""
Step = Callable[[], None]


@dataclass(frozen=True)
class Size:
    """A model and a batch."""

    vocab: int
    width: int
    heads: int
    depth: int
    context: int
    rows: int

    @property
    def tokens(self) -> int:
        return self.rows * self.context


MEDIUM = Size(vocab=50304, width=1024, heads=16, depth=24, context=1024, rows=16)
TINY = Size(vocab=64, width=32, heads=2, depth=3, context=16, rows=4)


@dataclass(frozen=True)
class Row:
    """One way to run the model."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    slow: bool = False
    """The optimizer runs on the host: seconds a step on a large model."""
    fused: bool | None = None
    """The optimizer's own fused kernel; None leaves the choice to torch and hasten."""


def list_rows() -> list[Row]:
    def sharded_row(
        name: str, slow: bool = False, fused: bool | None = None, **options: Any
    ) -> Row:
        return Row(
            name,
            {"fsdp_plugin": FullyShardedDataParallelPlugin(**options)},
            slow,
            fused,
        )

    recompute: dict[str, Any] = {"activation_checkpointing": True}
    return [
        Row("plain", {"strategy": "none"}),
        sharded_row("FSDP2"),
        sharded_row(
            "FSDP2, parameters kept after forward", reshard_after_forward=False
        ),
        sharded_row("FSDP2, activation checkpointing", **recompute),
        sharded_row(
            "FSDP2, activation checkpointing, inputs in host memory",
            activation_checkpointing_offload=True,
            **recompute,
        ),
        sharded_row("FSDP2, CPU offload", slow=True, cpu_offload=True),
        sharded_row(
            "FSDP2, CPU offload, fused AdamW", slow=True, fused=True, cpu_offload=True
        ),
        sharded_row(
            "FSDP2, CPU offload, fused AdamW, activation checkpointing",
            slow=True,
            fused=True,
            cpu_offload=True,
            **recompute,
        ),
    ]


# -- what is trained --------------------------------------------------------------------------------------------------
class Block(nn.Module):
    """One pre-norm transformer layer with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (
            self.qkv(self.norm1(x))
            .view(batch, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        q, k, v = heads.unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))  # type: ignore[no-any-return]


class Writer(nn.Module):
    """A language model that gives its loss, so that no logits leave it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed, self.position = (
            nn.Embedding(size.vocab, size.width),
            nn.Embedding(size.context, size.width),
        )
        self.blocks = nn.ModuleList(
            Block(size.width, size.heads) for _ in range(size.depth)
        )
        self.norm, self.head = (
            nn.LayerNorm(size.width),
            nn.Linear(size.width, size.vocab, bias=False),
        )
        self.head.weight = self.embed.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def build_step(row: Row, size: Size, cpu: bool) -> Step:
    """One training step of a row, as a function."""
    accelerator = Accelerator(mixed_precision="bf16", cpu=cpu, **row.settings)
    torch.manual_seed(0)
    with accelerator.device:
        net: nn.Module = Writer(size)
        tokens = torch.randint(0, size.vocab, (size.rows, size.context))
    net, optimizer = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=1e-4, fused=row.fused)
    )

    def step() -> None:
        accelerator.backward(net(tokens))
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


# -- measuring --------------------------------------------------------------------------------------------------------
def wait_for_device(cpu: bool) -> None:
    if not cpu:
        torch.cuda.synchronize()


def step_seconds(step: Step, times: int, cpu: bool) -> float:
    """Mean seconds of one step."""
    wait_for_device(cpu)
    start = time.perf_counter()
    for _ in range(times):
        step()
    wait_for_device(cpu)
    return (time.perf_counter() - start) / times


def clear_memory(cpu: bool) -> None:
    gc.collect()
    if not cpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure_ratio(size: Size, cpu: bool, rounds: int, times: int) -> dict[str, Any]:
    """FSDP2 beside plain, taking turns."""
    plain, sharded = (build_step(row, size, cpu) for row in list_rows()[:2])
    for step in (plain, sharded):
        step_seconds(step, WARM_UP, cpu)
    pairs = [
        (step_seconds(plain, times, cpu), step_seconds(sharded, times, cpu))
        for _ in range(rounds)
    ]
    ratios = sorted(b / a for a, b in pairs)
    return {
        "plain_ms": 1e3 * statistics.median(a for a, _ in pairs),
        "fsdp2_ms": 1e3 * statistics.median(b for _, b in pairs),
        "ratio": statistics.median(ratios),
        "lowest": ratios[0],
        "highest": ratios[-1],
        "rounds": rounds,
        "steps_per_round": times,
    }


def measure_row(row: Row, size: Size, cpu: bool, times: int) -> dict[str, Any]:
    """A row alone: time, peak of device memory, and what stays between steps."""
    clear_memory(cpu)
    step = build_step(row, size, cpu)
    step_seconds(step, 1 if row.slow else WARM_UP, cpu)
    if not cpu:
        torch.cuda.reset_peak_memory_stats()
    rounds, each = (1, max(2, times // 5)) if row.slow else (4, max(1, times // 4))
    taken = statistics.median(step_seconds(step, each, cpu) for _ in range(rounds))
    measurements: dict[str, Any] = {
        "ms": 1e3 * taken,
        "tokens_per_second": size.tokens / taken,
    }
    if not cpu:
        measurements["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        measurements["held_gib"] = torch.cuda.memory_allocated() / 2**30
    return measurements


def attempt_measurement(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `work` finds, or its error: the other measurements are still worth having."""
    try:
        return work()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return {"error": (str(error).splitlines() or [type(error).__name__])[0]}


# -- reporting --------------------------------------------------------------------------------------------------------
def collect_facts(size: Size, cpu: bool) -> dict[str, Any]:
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Writer(size).parameters())
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": f"{os.cpu_count()} CPU cores"
        if cpu
        else torch.cuda.get_device_name(),
        "parameters": parameters,
        "tokens per step": size.tokens,
    }


def describe_turns(beside: dict[str, Any]) -> str:
    if "error" in beside:
        return f"Taking turns failed: {beside['error']}"
    judged = "within" if beside["ratio"] <= TARGET else "over"
    return (
        f"Taking turns, {beside['rounds']} rounds of {beside['steps_per_round']} steps: plain {beside['plain_ms']:.2f} ms, "
        f"FSDP2 in a world of one {beside['fsdp2_ms']:.2f} ms, × {beside['ratio']:.3f} "
        f"({beside['lowest']:.3f} to {beside['highest']:.3f}); {judged} the target for a GPU of × {TARGET}."
    )


def format_page(
    run_facts: dict[str, Any], beside: dict[str, Any], table: list[dict[str, Any]]
) -> str:
    lines = [
        "# FSDP2 on one device",
        "",
        ", ".join(f"{key} {value}" for key, value in run_facts.items()),
        "",
        describe_turns(beside),
        "",
        "| alone | ms a step | tokens/s | × plain | peak GiB | GiB between steps |",
        "|---|---|---|---|---|---|",
    ]
    base = next((row["ms"] for row in table if "ms" in row), None)
    for row in table:
        if base is None or "ms" not in row:
            lines.append(f"| {row['row']} | failed: {row.get('error')} | | | | |")
            continue
        memory = [
            f"{row[key]:.2f}" if key in row else "–" for key in ("peak_gib", "held_gib")
        ]
        cells = [
            f"{row['ms']:.1f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['ms'] / base:.3f}",
            *memory,
        ]
        lines.append(f"| {row['row']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cuda" if torch.cuda.is_available() else "cpu",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=None,
        help="folder for sharding.json and sharding.md",
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8, help="steps of a round")
    args = parser.parse_args()
    cpu = args.device == "cpu"
    size = TINY if cpu else MEDIUM
    run_facts = collect_facts(size, cpu)
    start_time = time.perf_counter()
    beside = attempt_measurement(
        lambda: measure_ratio(size, cpu, args.rounds, args.steps)
    )
    table = [
        {
            "row": row.name,
            **attempt_measurement(partial(measure_row, row, size, cpu, 2 * args.steps)),
        }
        for row in list_rows()
    ]
    run_facts["seconds"] = round(time.perf_counter() - start_time)
    text = format_page(run_facts, beside, table)
    print(text)
    out = args.out if args.out is not None or cpu else RESULTS
    if out is not None:
        measurements = {"facts": run_facts, "beside": beside, "table": table}
        record_run(
            "sharding",
            args.device,
            measurements,
            text,
            {"hardware": run_facts["device"]},
            folder=out,
        )
    with suppress(ValueError):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
