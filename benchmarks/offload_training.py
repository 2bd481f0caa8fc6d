"""Training with optimizer state and parameters in host memory: time and device memory against the run without offload, bit for bit.

    python benchmarks/offload_training.py --device cuda                 # one GPU, about three minutes
    python benchmarks/offload_training.py --device cpu                  # a tiny model, to see that it runs

A Llama-like model of 1.1 billion parameters in bf16 with fused AdamW: 16 layers of width 2048, 8 x 2048 tokens a step. Every way trains the same
steps: none, the three modes of `offload`, and FSDP2's own CPU offload with a fused AdamW on the host as the peer. Each way takes turns with the run
without offload, a few steps each, so that both see the same clock and temperature; the ratio is the median of the rounds' ratios. Losses and weights of the modes must equal those
without offload bit for bit, else the script fails. Results go to benchmarks/results (or --out) as JSON and Markdown.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from recording import RESULTS, record_run
from torch import Tensor, nn
from torch.nn import functional as F

from hasten import Accelerator, FullyShardedDataParallelPlugin

TARGETS = {"optimizer": 1.35, "all": 2.0}
WARM_UP = 3
PLAIN = "no offload"


@dataclass(frozen=True)
class Size:
    """A model and a batch."""

    vocab: int
    width: int
    heads: int
    inner: int
    depth: int
    context: int
    rows: int

    @property
    def tokens(self) -> int:
        return self.rows * self.context


LARGE = Size(
    vocab=32000, width=2048, heads=16, inner=7168, depth=16, context=2048, rows=8
)
TINY = Size(vocab=64, width=32, heads=2, inner=64, depth=4, context=16, rows=2)


@dataclass(frozen=True)
class Way:
    """One way to train the model."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    exact: bool = True
    """Its losses and weights must equal those without offload."""


def list_offload_ways(peer: bool) -> list[Way]:
    offload_ways = [
        Way(PLAIN),
        *(
            Way(f'offload="{mode}"', {"offload": mode})
            for mode in ("optimizer", "parameters", "all")
        ),
    ]
    if peer:
        plugin = FullyShardedDataParallelPlugin(cpu_offload=True)
        offload_ways.append(
            Way("FSDP2, CPU offload, fused AdamW", {"fsdp_plugin": plugin}, exact=False)
        )
    return offload_ways


class Block(nn.Module):
    """One layer of a Llama: attention with rotated queries and keys, and a gated feed-forward part."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.gate, self.up = (
            nn.Linear(size.width, size.inner, bias=False) for _ in range(2)
        )
        self.down = nn.Linear(size.inner, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        projections = (
            self.qkv(self.norm1(x))
            .view(batch, length, 3, self.heads, -1)
            .permute(2, 0, 3, 1, 4)
        )
        q, k, v = projections.unbind(0)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        inside = self.norm2(x)
        return x + self.down(F.silu(self.gate(inside)) * self.up(inside))  # type: ignore[no-any-return]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Llama(nn.Module):
    """A language model that gives its loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocab, size.width)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.norm, self.head = (
            nn.RMSNorm(size.width),
            nn.Linear(size.width, size.vocab, bias=False),
        )
        half = size.width // size.heads // 2
        angles = torch.outer(
            torch.arange(size.context), 10000.0 ** -(torch.arange(half) / half)
        ).repeat(1, 2)
        self.register_buffer("cos", angles.cos().bfloat16())
        self.register_buffer("sin", angles.sin().bfloat16())
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Training:
    """A model in training under one way."""

    def __init__(self, offload_way: Way, size: Size, device: torch.device) -> None:
        self.way = offload_way
        self.device = device
        self.accelerator = Accelerator(
            mixed_precision="bf16", cpu=device.type == "cpu", **offload_way.settings
        )
        torch.manual_seed(0)
        with device:
            net: Any = Llama(size)
            self.batches = torch.randint(0, size.vocab, (4, size.rows, size.context))
        self.num_parameters = sum(p.numel() for p in net.parameters())
        self.model, self.optimizer = self.accelerator.prepare(
            net, torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
        )
        self.losses: list[Tensor] = []
        self.step_s: list[float] = []
        self.peak_bytes = 0

    def step(self) -> None:
        loss = self.model(self.batches[len(self.losses) % len(self.batches)])
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def steps(self, count: int) -> float:
        """Seconds of one of `count` steps; also notes the peak of device memory."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        for _ in range(count):
            self.step()
        if cuda:
            torch.cuda.synchronize()
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated())
        return (time.perf_counter() - started) / count


@dataclass
class Times:
    """Seconds of a step under one way and without offload, from turns of both."""

    offloaded: list[float]
    plain: list[float]
    losses: list[float]
    plain_losses: list[float]
    parameters: int


def in_turns(
    size: Size, device: torch.device, offload_way: Way, rounds: int, each: int
) -> Times:
    """Train with one way and without offload, in turns; the device holds both."""
    plain, offloaded = (
        Training(Way(PLAIN), size, device),
        Training(offload_way, size, device),
    )
    for training in (plain, offloaded):
        training.steps(WARM_UP)
    for _ in range(rounds):
        for training in (plain, offloaded):
            training.step_s.append(training.steps(each))
    losses, without = (
        [round(float(loss), 6) for loss in training.losses[:6]]
        for training in (offloaded, plain)
    )
    return Times(
        offloaded.step_s, plain.step_s, losses, without, offloaded.num_parameters
    )


def measure_peak(
    size: Size, device: torch.device, offload_way: Way, each: int
) -> float:
    """Peak of device memory in GiB of a way that trains alone."""
    training = Training(offload_way, size, device)
    training.steps(WARM_UP)
    training.peak_bytes = 0
    training.steps(each)
    return training.peak_bytes / 2**30


def clear_memory(device: torch.device) -> None:
    """Free the memory of trainings that are over."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def train_deterministically(
    offload_way: Way, size: Size, device: torch.device, steps: int
) -> tuple[list[float], list[Tensor]]:
    """Losses and weights after some steps with deterministic algorithms; attention's backward differs from run to run without them."""
    torch.use_deterministic_algorithms(True)
    try:
        training = Training(offload_way, size, device)
        training.steps(steps)
        return [float(loss) for loss in training.losses], [
            p.detach().to(device, copy=True) for p in training.model.parameters()
        ]
    finally:
        torch.use_deterministic_algorithms(False)


def check_equality(
    names: list[Way], size: Size, device: torch.device, steps: int
) -> dict[str, bool]:
    """Compare losses and weights of every exact way with those without offload, which trains twice."""
    losses, weights = train_deterministically(names[0], size, device, steps)
    equal_by_name = {}
    for offload_way in names:
        clear_memory(device)
        if offload_way.exact:
            repeated_losses, offloaded_weights = train_deterministically(
                offload_way, size, device, steps
            )
            equal_by_name[offload_way.name] = repeated_losses == losses and all(
                map(torch.equal, weights, offloaded_weights)
            )
            del offloaded_weights
    clear_memory(device)
    return equal_by_name


def installed_versions(device: torch.device) -> dict[str, str]:
    platform_versions = {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        platform_versions["hardware"] = torch.cuda.get_device_name(device)
    return platform_versions


def format_table(rows: list[dict[str, Any]], size: Size, parameters: int) -> str:
    lines = [
        f"{parameters / 1e9:.2f} billion parameters, {size.tokens} tokens a step, bf16, AdamW(fused=True).",
        "",
        "| way | s per step | ratio | peak of device memory, GiB | equal bit for bit |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        equal = {True: "yes", False: "NO", None: ""}[row["equal"]]
        lines.append(
            f"| {row['way']} | {row['step_s']:.3f} | {row['ratio']:.2f} | {row['peak_gib']:.1f} | {equal} |"
        )
    return "\n".join(lines)


def summarize_times(
    times: dict[str, Times], equal: dict[str, bool], peaks: dict[str, float]
) -> list[dict[str, Any]]:
    rows = []
    for name, way_times in times.items():
        ratios = [
            a / b for a, b in zip(way_times.offloaded, way_times.plain, strict=True)
        ]
        rows.append(
            {
                "way": name,
                "step_s": round(statistics.median(way_times.offloaded), 4),
                "plain_s": round(statistics.median(way_times.plain), 4),
                "ratio": round(statistics.median(ratios), 3),
                "ratios": [round(ratio, 3) for ratio in ratios],
                "peak_gib": round(peaks.get(name, 0.0), 2),
                "equal": equal.get(name),
                "losses": way_times.losses,
            }
        )
    return rows


def start_one_rank() -> None:
    """Start a world of one, which FSDP2 needs."""
    world_variables = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29533",
    }
    for name, value in world_variables.items():
        os.environ.setdefault(name, value)


def _is_wanted(name: str, words: list[str]) -> bool:
    return not words or any(word in name for word in words)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        choices=("cuda", "cpu"),
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--each", type=int, default=4, help="steps of a turn")
    parser.add_argument(
        "--no-peer", action="store_true", help="leave FSDP2's CPU offload out"
    )
    parser.add_argument(
        "--only", nargs="*", default=[], help="words in the names of ways to run"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    device = torch.device(args.device)
    size = LARGE if device.type == "cuda" else TINY
    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # before the first product, for deterministic algorithms
    start_one_rank()
    names = [
        offload_way
        for offload_way in list_offload_ways(not args.no_peer)
        if offload_way.name == PLAIN or _is_wanted(offload_way.name, args.only)
    ]
    if len(names) == 1:
        parser.error(f"no way to train has a name with one of {args.only}")
    equal = check_equality(names, size, device, args.each)
    peaks, times = {}, dict[str, Times]()
    for offload_way in names:
        peaks[offload_way.name] = measure_peak(size, device, offload_way, args.each)
        clear_memory(device)
    for offload_way in names[1:]:
        times[offload_way.name] = in_turns(
            size, device, offload_way, args.rounds, args.each
        )
        clear_memory(device)
    first_times = next(iter(times.values()))
    without = [seconds for way_times in times.values() for seconds in way_times.plain]
    plain = Times(
        without,
        without,
        first_times.plain_losses,
        first_times.plain_losses,
        first_times.parameters,
    )
    rows = summarize_times({PLAIN: plain, **times}, equal, peaks)
    parameters = first_times.parameters
    page = format_table(rows, size, parameters)
    print(page)
    record_run(
        "offload_training",
        args.device,
        {"parameters": parameters, "tokens": size.tokens, "rows": rows},
        page,
        installed_versions(device),
        args.out,
    )
    if device.type == "cuda":
        for mode, target in TARGETS.items():
            for row in rows:
                if row["way"] == f'offload="{mode}"':
                    print(
                        f"{mode}: {row['ratio']:.2f} x, wanted at most {target:.2f} x"
                    )
    with suppress(Exception):
        dist.destroy_process_group()
    if not all(equal.values()):
        sys.exit(
            f"not equal bit for bit: {[name for name, is_equal in equal.items() if not is_equal]}"
        )


if __name__ == "__main__":
    main()
