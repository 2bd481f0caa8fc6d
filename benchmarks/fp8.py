"""fp8 beside bf16 for a GPT-2-medium-sized model: tokens a second and the loss, through hasten's own `mixed_precision`.

    python benchmarks/fp8.py --device cuda                # eager, then blocks compiled: about three minutes on an H200
    python benchmarks/fp8.py --device cuda --eager        # eager only
    python benchmarks/fp8.py                              # a tiny model on the CPU, where fp8 is emulated

Needs torchao. Every contender trains the same model from the same weights on the same batches. The sequences follow a
rule with noise, so that the loss falls towards a known floor and a precision that does not learn shows. Speed is
measured in turns of a few steps, after the losses. Results are written after every contender.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from loading import versions
from recording import RESULTS, record
from step_overhead import GPT2
from torch import Tensor, nn

from hasten import Accelerator, AORecipeKwargs, FP8Config, TorchDynamoPlugin


@dataclass(frozen=True)
class Size:
    """A model and its batches."""

    name: str
    vocabulary: int
    length: int
    width: int
    layers: int
    heads: int
    rows: int
    losses: int
    turns: int


MEDIUM = Size("GPT-2-medium-sized", 50304, 1024, 1024, 24, 16, 16, 48, 5)
TINY = Size("tiny", 512, 32, 64, 3, 4, 4, 12, 2)
TURN = 4
NOISE = 0.1


@dataclass(frozen=True)
class Contender:
    name: str
    precision: str
    recipe: str | None = None
    compiled: bool = False


CONTENDERS = (
    Contender("bf16", "bf16"),
    Contender("fp8 tensorwise", "fp8", "tensorwise"),
    Contender("fp8 rowwise", "fp8", "rowwise"),
    Contender("bf16, blocks compiled", "bf16", compiled=True),
    Contender("fp8 tensorwise, blocks compiled", "fp8", "tensorwise", compiled=True),
    Contender("fp8 rowwise, blocks compiled", "fp8", "rowwise", compiled=True),
)


def sequences(size: Size, count: int, device: torch.device) -> list[Tensor]:
    """Batches in which a token decides the next one, but for one in ten, which is drawn at random."""
    source = torch.Generator().manual_seed(1)
    used = min(size.vocabulary, 1000)
    follows = torch.randperm(used, generator=source)
    batches = []
    for _ in range(count):
        tokens = torch.empty(size.rows, size.length + 1, dtype=torch.int64)
        tokens[:, 0] = torch.randint(used, (size.rows,), generator=source)
        for place in range(1, size.length + 1):
            drawn = torch.randint(used, (size.rows,), generator=source)
            random = torch.rand(size.rows, generator=source) < NOISE
            tokens[:, place] = torch.where(random, drawn, follows[tokens[:, place - 1]])
        batches.append(tokens.to(device))
    return batches


def floor(size: Size) -> float:
    """The loss of a model that knows the rule."""
    used = min(size.vocabulary, 1000)
    right = 1 - NOISE + NOISE / used
    return -right * math.log(right) - (used - 1) * NOISE / used * math.log(NOISE / used)


def training(contender: Contender, size: Size, device: torch.device) -> Callable[[Tensor], Tensor]:
    """One step of the contender: it takes a batch and gives its loss."""
    torch.manual_seed(0)
    model: nn.Module = GPT2(False, size.vocabulary, size.length, size.width, size.layers, size.heads)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    settings: dict[str, Any] = {"mixed_precision": contender.precision, "cpu": device.type == "cpu"}
    if contender.recipe:
        settings["kwargs_handlers"] = [FP8Config(backend="ao", ao=AORecipeKwargs(recipe_name=contender.recipe))]
    if contender.compiled:
        settings["dynamo_plugin"] = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
    accelerator = Accelerator(**settings)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=device.type == "cuda")
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = model(tokens)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def timed(steps: dict[str, Callable[[Tensor], Tensor]], size: Size, batches: list[Tensor]) -> dict[str, float]:
    """Median seconds a step, contenders in turns."""
    sync = torch.cuda.synchronize if batches[0].is_cuda else (lambda: None)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(size.turns + 1):
        for name, step in steps.items():
            sync()
            begun = time.perf_counter()
            for number in range(TURN):
                step(batches[number % len(batches)])
            sync()
            if turn:
                times[name].append((time.perf_counter() - begun) / TURN)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def measure(group: list[Contender], size: Size, device: torch.device, batches: list[Tensor]) -> list[dict[str, Any]]:
    """Losses of each contender, then their speed in turns."""
    steps, rows = {}, []
    for contender in group:
        begun = time.perf_counter()
        step = training(contender, size, device)
        losses = [step(batch) for batch in batches]
        values = torch.stack(losses).tolist()
        steps[contender.name] = step
        ends = values[-max(len(values) // 6, 1) :]
        rows.append({"contender": contender.name, "first loss": values[0], "last losses": statistics.mean(ends)})
        rows[-1]["losses"] = [round(value, 4) for value in values]
        print(f"{contender.name}: loss {values[0]:.3f} to {rows[-1]['last losses']:.4f}, ", end="")
        print(f"{time.perf_counter() - begun:.0f} s with set-up", flush=True)
    for row, seconds in zip(rows, timed(steps, size, batches).values(), strict=True):
        row["ms a step"] = seconds * 1e3
        row["tokens a second"] = size.rows * size.length / seconds
        print(f"{row['contender']}: {row['tokens a second'] / 1e3:.1f} ktok/s", flush=True)
    return rows


def markdown(found: dict[str, Any]) -> str:
    lines = [
        f"# fp8 beside bf16, {found['model']}",
        "",
        ", ".join(f"{k} {v}" for k, v in found["versions"].items()),
        "",
    ]
    lines += [
        f"{found['parameters'] / 1e6:.0f} M parameters, {found['tokens']} tokens a step, AdamW, clipping; the loss is the mean of the last "
        f"sixth of {found['steps']} steps from the same weights on the same batches (a model that knows the rule of the data "
        f"reaches {found['floor']:.3f}). Speed: median of interleaved turns of {TURN} steps, by the clock.",
        "",
        "| | ktok/s | × bf16 of the same kind | loss |",
        "|---|---|---|---|",
    ]
    for group in found["groups"]:
        base = group[0]["tokens a second"]
        for row in group:
            speed = row["tokens a second"]
            lines.append(f"| {row['contender']} | {speed / 1e3:.1f} | {speed / base:.2f} | {row['last losses']:.4f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--eager", action="store_true", help="leave the compiled contenders out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = torch.device(args.device)
    size = MEDIUM if args.device == "cuda" else TINY
    if args.device == "cpu":
        torch.set_num_threads(1)
    batches = sequences(size, size.losses, device)
    with torch.device("meta"):
        count = sum(p.numel() for p in GPT2(False, size.vocabulary, size.length, size.width, size.layers).parameters())
    known = {**versions(args.device), "torchao": metadata.version("torchao")}
    found: dict[str, Any] = {"model": size.name, "versions": known, "parameters": count, "steps": size.losses}
    found |= {"tokens": size.rows * size.length, "floor": floor(size), "groups": []}
    compiled = args.device == "cuda" and not args.eager
    for kind in (False, True) if compiled else (False,):
        group = [contender for contender in CONTENDERS if contender.compiled is kind]
        found["groups"].append(measure(group, size, device, batches))
        record("fp8", args.device, found, markdown(found), known, args.out)
        gc.collect()
    print(markdown(found))


if __name__ == "__main__":
    main()
