"""What Muon and a moving average of the weights cost beside AdamW: seconds of an update on a Llama, interleaved in one run.

    python benchmarks/muon.py                  # 1.1 B parameters on one GPU, windows of 8 x 16,384 tokens
    python benchmarks/muon.py --cpu            # a small model, to see that it runs

Expected: the iteration needs about 45 TFLOP for every update of this model (steps of long matrices are taken in pairs), a step of
131,072 tokens about 860, so about 5 % at equal speed; less, because products of square matrices run faster than a training step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from loading import versions
from recording import record
from torch import nn

import hasten

# Any in this file: models and optimizers of other packages.


def llama(small: bool, device: torch.device) -> nn.Module:
    """Return a Llama of transformers with 16 layers of width 2048, or a tiny one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = (
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": 256,
        }
        if small
        else {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "vocab_size": 32000,
        }
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = LlamaForCausalLM(LlamaConfig(**size, num_key_value_heads=size["num_attention_heads"]))
    return model.to(torch.bfloat16) if not small else model


def contender(name: str, small: bool, window: int, rows: int, tokens: int) -> Callable[[], float]:
    """Return a function that makes one update of a window and returns its seconds."""
    accelerator = hasten.Accelerator(gradient_accumulation_steps=window, cpu=small)
    model: Any = llama(small, accelerator.device)
    if name == "Muon":
        made = hasten.optimizers(model, kind="muon", show=False)
    else:
        made = [torch.optim.AdamW(model.parameters(), lr=3e-4, fused=not small)]
    prepared = accelerator.prepare(model, *made)
    model, optimizers = prepared[0], prepared[1:]
    if name == "AdamW with EMA":
        accelerator.ema(model, 0.999)
    batch = torch.randint(0, 256, (rows, tokens), device=accelerator.device)

    def update() -> float:
        wait(accelerator.device)
        began = time.perf_counter()
        for _ in range(window):
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=batch, labels=batch).loss)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        wait(accelerator.device)
        return time.perf_counter() - began

    return update


def wait(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--rounds", type=int, default=4, help="timed updates of each")
    parser.add_argument("--window", type=int, default=8, help="micro-batches in an update")
    given = parser.parse_args()
    rows, tokens = (2, 32) if given.cpu else (8, 2048)
    names = ("AdamW", "Muon", "AdamW with EMA")
    updates = {name: contender(name, given.cpu, given.window, rows, tokens) for name in names}
    for update in updates.values():
        update()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(given.rounds):
        for name, update in updates.items():
            seconds[name].append(update())
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    base = medians["AdamW"]
    lines = [
        "# Muon and EMA beside AdamW",
        "",
        f"One update of {given.window} x {rows * tokens:,} tokens; median of {given.rounds} interleaved updates.",
        "",
        "| optimizer | update, ms | beside AdamW |",
        "|---|---|---|",
        *(f"| {name} | {1e3 * value:.1f} | {value / base:.3f} x |" for name, value in medians.items()),
    ]
    page = "\n".join(lines)
    record(
        "muon",
        "cpu" if given.cpu else "cuda",
        {"seconds": seconds, "medians": medians},
        page,
        versions("cpu" if given.cpu else "cuda"),
    )
    print(page)


if __name__ == "__main__":
    main()
