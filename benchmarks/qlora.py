"""What four-bit weights cost and save in LoRA training: step time and memory of a Llama, interleaved in one run.

    python benchmarks/qlora.py                 # 1.1 B parameters on one GPU, 8 x 1,024 tokens in a step
    python benchmarks/qlora.py --cpu           # a small model, to see that it runs

Needs peft; contenders whose package (bitsandbytes, torchao) is missing are left out and named. All four-bit contenders of one package start from
the same weights and adapters and read the same batches, so that their losses can be compared.
Expected: four bits for a weight and one scale of four bytes for 64 weights make 4.5 bits instead of 16, so the blocks' weights shrink to 28 %;
the products are the same, and each weight is converted to bf16 twice in a step.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from loading import versions
from muon import llama, wait
from recording import record
from torch import nn

import hasten

# Any in this file: models and optimizers of other packages.


@dataclass(frozen=True)
class Contender:
    """One way to store the base weights and to train the adapters."""

    name: str
    kind: str
    package: str | None = None
    strategy: str | None = "none"
    """None for a loop of bare torch."""


CONTENDERS = (
    Contender("LoRA, bf16 weights", "bf16"),
    Contender("QLoRA, bitsandbytes nf4, bare torch", "nf4", "bitsandbytes", None),
    Contender("QLoRA, bitsandbytes nf4", "nf4", "bitsandbytes"),
    Contender("QLoRA, bitsandbytes nf4, FSDP2", "nf4", "bitsandbytes", "fsdp"),
    Contender("QLoRA, torchao nf4, bare torch", "torchao-nf4", "torchao", None),
    Contender("QLoRA, torchao nf4, FSDP2", "torchao-nf4", "torchao", "fsdp"),
)
REFERENCE = CONTENDERS[0].name


class Run:
    """A contender's model and optimizer, the bytes that they hold, and the losses of all steps."""

    def __init__(self, contender: Contender, small: bool, rows: int, tokens: int) -> None:
        self.contender = contender
        self.losses: list[float] = []
        self.peaks: list[int] = []
        accelerator = hasten.Accelerator(cpu=small, strategy=contender.strategy or "none")
        self.device = accelerator.device
        before = allocated(self.device)
        model: Any = with_adapters(quantized(llama(small, self.device).requires_grad_(False), contender.kind))
        optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        self._backward: Callable[[Any], None] = torch.autograd.backward
        if contender.strategy is not None:
            model, optimizer = accelerator.prepare(model, optimizer)
            self._backward = accelerator.backward
        self.model, self.optimizer = model, optimizer
        gc.collect()
        self.weight_bytes = allocated(self.device) - before
        self._batch = torch.randint(0, 256, (rows, tokens), generator=torch.Generator().manual_seed(1)).to(self.device)

    def step(self) -> float:
        """Train one step and return its seconds."""
        wait(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before, began = allocated(self.device), time.perf_counter()
        loss = self.model(input_ids=self._batch, labels=self._batch).loss
        self._backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        wait(self.device)
        seconds = time.perf_counter() - began
        self.losses.append(loss.item())
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        self.peaks.append(peak - before if peak else 0)
        return seconds


def allocated(device: torch.device) -> int:
    """Return the bytes that torch has allocated on the device; 0 on the CPU, which has no counter."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def quantized(model: nn.Module, kind: str) -> nn.Module:
    """Return the model with the linear layers of its blocks in four bits."""
    from hasten.bigmodel import quantize_weights

    if kind == "nf4":
        return quantize_weights(model, "nf4")
    if kind == "torchao-nf4":
        from torchao.quantization import NF4Tensor

        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and "lm_head" not in name:
                block = min(64, layer.weight.numel() // 4)
                made = NF4Tensor.from_tensor(layer.weight.detach(), block, min(256, layer.weight.numel() // block))
                layer.weight = nn.Parameter(made, requires_grad=False)
    return model


def with_adapters(model: nn.Module) -> Any:
    """Return the model with LoRA adapters of rank 16 on its attention and its first product."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"]))


def page_of(runs: list[Run], seconds: dict[str, list[float]], rows: int, tokens: int, missing: list[str]) -> str:
    """Return the table of all contenders."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    lines = [
        "# LoRA on four-bit weights",
        "",
        f"One step of {rows} x {tokens:,} tokens; median of {len(next(iter(seconds.values())))} interleaved steps. Weights: all that the model "
        "and the optimizer hold after `prepare()`. Peak: what a step allocates besides.",
        "",
        "| contender | step, ms | beside bf16 | ktok/s | weights, MiB | peak, MiB | first loss | last loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        name = run.contender.name
        value = medians[name]
        speed = f"{1e3 * value:.1f} | {value / medians[REFERENCE]:.2f} x | {rows * tokens / value / 1e3:.1f}"
        memory = f"{run.weight_bytes / 2**20:.0f} | {max(run.peaks[1:]) / 2**20:.0f}"
        lines.append(f"| {name} | {speed} | {memory} | {run.losses[0]:.4f} | {run.losses[-1]:.4f} |")
    return "\n".join([*lines, *(f"\nLeft out: {name} is not installed." for name in missing)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--rounds", type=int, default=8, help="timed steps of each")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", module="torchao|peft")  # about kernels that were built for another torch
    rows, tokens = (2, 32) if given.cpu else (8, 1024)
    present = [one for one in CONTENDERS if one.package is None or importlib.util.find_spec(one.package)]
    missing = sorted({one.package for one in CONTENDERS if one not in present and one.package is not None})
    runs = [Run(one, given.cpu, rows, tokens) for one in present]
    for run in runs:
        run.step()
        run.step()
    seconds: dict[str, list[float]] = {run.contender.name: [] for run in runs}
    for _ in range(given.rounds):
        for run in runs:
            seconds[run.contender.name].append(run.step())
    page = page_of(runs, seconds, rows, tokens, missing)
    found = {
        run.contender.name: {
            "seconds": seconds[run.contender.name],
            "weight_bytes": run.weight_bytes,
            "peak_bytes": max(run.peaks[1:]),
            "losses": run.losses,
        }
        for run in runs
    }
    setting = "cpu" if given.cpu else "cuda"
    record("qlora", setting, found, page, versions(setting))
    print(page)


if __name__ == "__main__":
    main()
