"""Blocks of torch's own classes, compiled in every way: time of a step, graphs, and the wait of the first step.

    python benchmarks/compiled_blocks.py            # 12 layers of width 1024 in bf16 on one GPU, about three minutes
    python benchmarks/compiled_blocks.py --small    # on the CPU, without code generation, to see that it runs

Each way runs in a fresh process with an empty cache of the compiler, and `hasten, auto` a second time with the cache of its first run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from loading import versions
from recording import record
from torch import Tensor, nn
from torch._dynamo.utils import counters

WAYS = (
    "eager",
    "layer.compile()",
    "torch.compile(layer)",
    "torch.compile(model)",
    "hasten, blocks",
    "hasten, whole",
    "hasten, auto",
)
BACKEND = "eager" if "--small" in sys.argv else "inductor"
PLUGINS: dict[str, dict[str, Any]] = {
    "hasten, blocks": {"dynamo_plugin": {"backend": BACKEND, "use_regional_compilation": True}},
    "hasten, whole": {"dynamo_backend": BACKEND},
    "hasten, auto": {"performance": "auto"},
}


def build(small: bool) -> nn.Module:
    torch.manual_seed(0)
    width, heads, depth = (32, 2, 2) if small else (1024, 16, 12)
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


def step_of(way: str, small: bool, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a training step, except for the optimizer's, compiled in one way."""
    model = build(small).to(device)
    if way.startswith("hasten"):
        from hasten import Accelerator

        accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="bf16", **PLUGINS[way])
        prepared = accelerator.prepare(model)

        def step(x: Tensor) -> Tensor:
            loss: Tensor = prepared(x).square().mean()
            accelerator.backward(loss)
            prepared.zero_grad()
            return loss.detach()

        return step
    called: Any = model
    if way == "torch.compile(model)":
        called = torch.compile(model, backend=BACKEND)
    for index, layer in enumerate(model.layers if "layer" in way else ()):
        if way == "layer.compile()":
            layer.compile(backend=BACKEND)
        else:
            model.layers[index] = torch.compile(layer, backend=BACKEND)

    def step(x: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss: Tensor = called(x).float().square().mean()
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return step


def measure(way: str, small: bool) -> dict[str, Any]:
    """Time the first step and the later ones of one way."""
    device = torch.device("cpu" if small or not torch.cuda.is_available() else "cuda")
    step = step_of(way, small, device)
    x = torch.randn(2, 8, 32) if small else torch.randn(16, 512, 1024, device=device)
    seconds = []
    for _ in range(3 if small else 40):
        started_s = time.perf_counter()
        loss = float(step(x))  # waits for the device
        seconds.append(time.perf_counter() - started_s)
    return {
        "way": way,
        "first_s": round(seconds[0], 2),
        "step_ms": round(1000 * statistics.median(seconds[len(seconds) // 2 :]), 2),
        "graphs": counters["stats"]["unique_graphs"],
        "loss": loss,
    }


def in_fresh_process(way: str, small: bool, cache: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--way", way, *(["--small"] if small else [])]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        return {"way": way, "error": ended.stderr.strip().splitlines()[-1]}
    row: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return row


def page(rows: list[dict[str, Any]], known: dict[str, str]) -> str:
    lines = ["# Compiled blocks of torch's own classes", "", ", ".join(f"{k} {v}" for k, v in known.items()), ""]
    lines += ["| | a step (ms) | the first step (s) | graphs |", "|---|---|---|---|"]
    for row in rows:
        cells = [row.get("step_ms"), row.get("first_s"), row.get("graphs", row.get("error"))]
        lines.append(f"| {row['way']} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--way", help="one way, in this process")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args.way, args.small)))
        return
    rows = []
    for way in WAYS[:-1] if args.small else WAYS:
        with tempfile.TemporaryDirectory(prefix="hasten-compiler-") as cache:
            rows.append(in_fresh_process(way, args.small, cache))
            print(json.dumps(rows[-1]), flush=True)
            if way == "hasten, auto":
                rows.append({**in_fresh_process(way, args.small, cache), "way": "hasten, auto, second start"})
                print(json.dumps(rows[-1]), flush=True)
    known = versions("cpu" if args.small else "cuda")
    print(page(rows, known))
    record("compiled_blocks", "small" if args.small else "cuda", rows, page(rows, known), known, args.out)


if __name__ == "__main__":
    main()
