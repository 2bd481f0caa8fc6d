"""The loss of a large vocabulary, whole and in chunks: peak memory, time and gradients; and the cost of counting tokens and operations.

    python benchmarks/chunked_loss.py --device cuda     # 16 384 tokens, width 2048, vocabulary 131 072: a minute on an H200
    python benchmarks/chunked_loss.py                   # a small one on the CPU, where memory is counted on the tensors made

Every contender computes the loss of the same hidden states and the gradients of hidden states and weight, under bf16 autocast, in
turns. Peaks are over what is there before, gradients included. torch's own fused loss is measured where torch has one.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from loading import versions
from recording import record
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hasten import Accelerator
from hasten.modules import ChunkedCrossEntropyLoss, use_chunked_loss
from tests.support.live_bytes import LiveBytes


@dataclass(frozen=True)
class Size:
    """Sizes of the head, and of the model whose throughput is tracked."""

    name: str
    tokens: int
    width: int
    vocabulary: int
    rounds: int
    steps: int
    blocks: int


LARGE = Size("16 384 tokens, width 2048, vocabulary 131 072", 16384, 2048, 131072, 8, 40, 4)
SMALL = Size("1024 tokens, width 64, vocabulary 8192", 1024, 64, 8192, 4, 30, 2)
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@contextmanager
def peak(device: torch.device) -> Iterator[list[int]]:
    """The highest number of bytes above those at the start, in a list that is filled at the end."""
    found: list[int] = []
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield found
        torch.cuda.synchronize()
        found.append(torch.cuda.max_memory_allocated() - before)
        return
    with LiveBytes() as live:
        yield found
    found.append(live.peak)


def whole(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The loss as models of the Hub compute it: logits, their float32 copy, cross entropy."""
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def contenders() -> dict[str, Loss]:
    """Every way to compute the loss that this torch has."""
    found: dict[str, Loss] = {
        "whole": whole,
        "in chunks": ChunkedCrossEntropyLoss(),
        "in chunks of 4096 tokens": ChunkedCrossEntropyLoss(chunk_tokens=4096),
    }
    own = getattr(F, "linear_cross_entropy", None)
    if own is not None:
        found["torch's linear_cross_entropy"] = own
    return found


def step(loss: Loss, given: tuple[Tensor, Tensor, Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """The loss and the gradients of hidden states and weight."""
    hidden, weight, target = given
    with torch.autocast(device.type, torch.bfloat16):
        made = loss(hidden, weight, target)
    return made.detach(), *torch.autograd.grad(made, (hidden, weight))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def losses(size: Size, device: torch.device) -> list[dict[str, Any]]:
    """Peak, milliseconds and distance to the whole loss of each contender."""
    source = torch.Generator().manual_seed(1)
    hidden = torch.randn(size.tokens, size.width, generator=source).to(device, torch.bfloat16).requires_grad_()
    weight = (torch.randn(size.vocabulary, size.width, generator=source) * 0.02).to(device).requires_grad_()
    target = torch.randint(0, size.vocabulary, (size.tokens,), generator=source).to(device)
    given = (hidden, weight, target)
    ways, seconds, rows = contenders(), {}, []
    for name, loss in list(ways.items()):
        try:
            with peak(device) as found:
                got = step(loss, given, device)
        except (TypeError, NotImplementedError, RuntimeError) as error:
            if name != "torch's linear_cross_entropy":
                raise
            print(f"{name}: {str(error).splitlines()[0]}")
            del ways[name]
            continue
        if name == "whole":
            reference = got
        rows.append(
            {
                "name": name,
                "peak_bytes": found[0],
                "loss_difference": abs(float(got[0]) - float(reference[0])),
                "gradient_differences": [
                    float((a.float() - b.float()).norm() / b.float().norm())
                    for a, b in zip(got[1:], reference[1:], strict=True)
                ],
            }
        )
        seconds[name] = []
        del got
    del reference
    for _ in range(size.rounds):
        for name, loss in ways.items():
            wait(device)
            begun = time.perf_counter()
            step(loss, given, device)
            wait(device)
            seconds[name].append(time.perf_counter() - begun)
    for row in rows:
        row["ms"] = 1e3 * statistics.median(seconds[row["name"]])
    return rows


class Model(nn.Module):
    """Embedding, a few blocks and a head: enough operators for a step."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.embed = nn.Embedding(size.vocabulary // 4, width)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                for _ in range(size.blocks)
            )
        )
        self.head = nn.Linear(width, size.vocabulary // 4, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        made: Tensor = self.head(self.blocks(self.embed(tokens)))
        return made


def throughput(size: Size, device: torch.device) -> dict[str, float]:
    """Milliseconds of a step without and with tracked throughput, in turns, and of the step whose operations are counted."""
    found: dict[str, list[float]] = {"off": [], "on": []}
    counting: list[float] = []
    values: dict[str, float] = {}
    length = 256
    rows = [{"labels": torch.randint(0, size.vocabulary // 4, (length,))} for _ in range(4 * size.steps)]
    for _ in range(3):
        for name in found:
            torch.manual_seed(0)
            accelerator = Accelerator(mixed_precision="bf16", cpu=device.type == "cpu")
            net = Model(size)
            use_chunked_loss(net, "head")
            model, optimizer, loader = accelerator.prepare(
                net, torch.optim.AdamW(net.parameters()), DataLoader(rows, batch_size=4)
            )
            tracked = (
                accelerator.track_throughput(peak_tflops=1.0 if device.type == "cpu" else None)
                if name == "on"
                else None
            )
            times = []
            for batch in loader:
                wait(device)
                begun = time.perf_counter()
                logits = model(batch["labels"])[:, :-1]
                accelerator.backward(F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten()))
                optimizer.step()
                optimizer.zero_grad()
                wait(device)
                times.append(time.perf_counter() - begun)
            found[name].append(1e3 * statistics.median(times[5:]))
            if tracked is not None:
                counting.append(1e3 * times[1])
                values = tracked.values()
            accelerator.end_training()
            accelerator.free_memory()
    off, on = (min(found[name]) for name in ("off", "on"))
    return {"off_ms": off, "on_ms": on, "counted_ms": min(counting), **values}


def page(size: Size, rows: list[dict[str, Any]], cost: dict[str, float]) -> str:
    """The tables."""
    first = rows[0]
    lines = [
        f"{size.name}, bf16 autocast, float32 weight: loss and gradients.",
        "",
        "| loss | peak GB | of whole | ms | gradients differ by |",
    ]
    lines.append("|---|---|---|---|---|")
    for row in rows:
        differ = ", ".join(f"{value:.1e}" for value in row["gradient_differences"])
        share = row["peak_bytes"] / first["peak_bytes"]
        lines.append(f"| {row['name']} | {row['peak_bytes'] / 1e9:.2f} | {share:.3f} | {row['ms']:.1f} | {differ} |")
    lines += [
        "",
        "| throughput | step, off (ms) | step, on (ms) | the counted step (ms) | tokens/s | mfu |",
        "|---|---|---|---|---|---|",
    ]
    mfu = f"{cost['mfu']:.1%}" if "mfu" in cost else "–"
    lines.append(
        f"| a small model | {cost['off_ms']:.3f} | {cost['on_ms']:.3f} | {cost['counted_ms']:.1f} | "
        f"{cost.get('tokens_per_second', 0):.0f} | {mfu} |"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    device = torch.device(args.device)
    size = LARGE if args.device == "cuda" else SMALL
    rows = losses(size, device)
    gc.collect()
    cost = throughput(size, device)
    text = page(size, rows, cost)
    print(text)
    record(
        "chunked_loss",
        "one GPU" if args.device == "cuda" else "CPU",
        {"losses": rows, "throughput": cost},
        text,
        versions(args.device),
    )


if __name__ == "__main__":
    main()
