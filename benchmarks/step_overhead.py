"""What hasten adds to a training step: side by side with bare torch, Hugging Face Accelerate and Lightning Fabric.

    python benchmarks/step_overhead.py                  # tiny steps and 2-process DDP on the CPU
    python benchmarks/step_overhead.py --device cuda    # tiny steps and a GPT-2-small-sized model on the GPU

Every case runs in a process of its own. Within it the contenders take turns, a few dozen steps each, many rounds over;
a contender's time is the median of its rounds, its ratio the median of its rounds' ratios to bare torch. Contenders
that are not installed, or refuse the case, are left out. Results go to benchmarks/results as JSON and Markdown.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from measuring import computing
from recording import RESULTS, record
from torch import Tensor, nn
from torch.nn import functional as F

from hasten import __version__ as hasten_version

Step = Callable[[int], None]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FABRIC = {"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


@dataclass(frozen=True)
class Case:
    """One kind of step."""

    name: str
    model: str = "tiny"
    precision: str = "no"
    every: int = 1
    processes: int = 1


TINY = (
    Case("fp32"),
    Case("bf16", precision="bf16"),
    Case("fp16", precision="fp16"),
    Case("fp32, accumulation 4", every=4),
    Case("bf16, accumulation 4", precision="bf16", every=4),
)
DDP = (Case("fp32, DDP on 2 processes", processes=2), Case("fp32, DDP, accumulation 4", processes=2, every=4))
GPT = (
    Case("GPT-2-small-sized, bf16", model="gpt", precision="bf16"),
    Case("the same, logits handed out", model="gpt-logits", precision="bf16"),
)


# -- what is trained --------------------------------------------------------------------------------------------------
class Block(nn.Module):
    """One pre-norm transformer layer with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        shape = (rows, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.norm2(x))


class GPT2(nn.Module):
    """A GPT of the size of GPT-2 small (124 M parameters, tied head); gives its own loss, or logits when asked.

    Logits that leave the model cost a copy: the libraries hand half-precision outputs out as float32.
    """

    def __init__(
        self,
        logits: bool,
        vocabulary: int = 50304,
        length: int = 1024,
        width: int = 768,
        layers: int = 12,
        heads: int = 12,
    ) -> None:
        super().__init__()
        self.logits = logits
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x, y = tokens[:, :-1], tokens[:, 1:]
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        out = self.head(self.norm(self.blocks(h)))
        return out if self.logits else next_token_loss(out, y)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass
class Task:
    """A model with its optimizer, data and loss."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]


def task(case: Case, device: torch.device) -> Task:
    torch.manual_seed(0)
    if case.model.startswith("gpt"):
        logits = case.model == "gpt-logits"
        model: nn.Module = GPT2(logits).to(device)
        tokens = torch.randint(50304, (4, 16, 1025), device=device)
        return Task(
            model,
            torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True),
            [(t, t[:, 1:]) for t in tokens],
            next_token_loss if logits else lambda loss, _: loss,
        )
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    data = [(torch.randn(32, 32, device=device), torch.randint(10, (32,), device=device)) for _ in range(8)]
    return Task(model, torch.optim.AdamW(model.parameters(), lr=1e-3), data, F.cross_entropy)


# -- the contenders ---------------------------------------------------------------------------------------------------
def bare(case: Case, device: torch.device) -> Step:
    """The loop a careful person writes by hand."""
    t = task(case, device)
    model, optimizer, count = t.model, t.optimizer, len(t.batches)
    if case.processes > 1:
        model = nn.parallel.DistributedDataParallel(model)
    dtype = DTYPES.get(case.precision)
    scaler = torch.amp.GradScaler(device.type) if case.precision == "fp16" else None

    def forward(i: int) -> Tensor:
        x, y = t.batches[i % count]
        if dtype is None:
            return t.loss(model(x), y)
        with torch.autocast(device.type, dtype):
            return t.loss(model(x), y)

    def update() -> None:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()

    def step(i: int) -> None:
        if case.every == 1:
            loss = forward(i)
            (loss if scaler is None else scaler.scale(loss)).backward()
            update()
            return
        last = i % case.every == case.every - 1
        with model.no_sync() if case.processes > 1 and not last else nullcontext():
            loss = forward(i) / case.every
            (loss if scaler is None else scaler.scale(loss)).backward()
        if last:
            update()

    return step


def accelerated(accelerator: Any, case: Case, device: torch.device) -> Step:
    """The loop for an object with Accelerate's method names."""
    t = task(case, device)
    model, optimizer = accelerator.prepare(t.model, t.optimizer)
    count = len(t.batches)

    def plain(i: int) -> None:
        x, y = t.batches[i % count]
        accelerator.backward(t.loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()

    def accumulating(i: int) -> None:
        x, y = t.batches[i % count]
        with accelerator.accumulate(model):
            accelerator.backward(t.loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    return plain if case.every == 1 else accumulating


def hasten(case: Case, device: torch.device) -> Step:
    from hasten import Accelerator

    accelerator = Accelerator(
        mixed_precision=case.precision, gradient_accumulation_steps=case.every, cpu=device.type == "cpu"
    )
    return accelerated(accelerator, case, device)


def accelerate(case: Case, device: torch.device) -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(
        mixed_precision=case.precision, gradient_accumulation_steps=case.every, cpu=device.type == "cpu"
    )
    return accelerated(accelerator, case, device)


def fabric(case: Case, device: torch.device) -> Step:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    many: dict[str, Any] = {"strategy": "ddp", "plugins": [TorchElasticEnvironment()]} if case.processes > 1 else {}
    runner = Fabric(accelerator=device.type, devices=case.processes, precision=FABRIC[case.precision], **many)
    runner.launch()
    t = task(case, device)
    model, optimizer = runner.setup(t.model, t.optimizer)
    count = len(t.batches)

    def step(i: int) -> None:
        x, y = t.batches[i % count]
        if case.every == 1:
            runner.backward(t.loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            return
        last = i % case.every == case.every - 1
        with runner.no_backward_sync(model, enabled=not last):
            runner.backward(t.loss(model(x), y) / case.every)
        if last:
            optimizer.step()
            optimizer.zero_grad()

    return step


CONTENDERS: dict[str, Callable[[Case, torch.device], Step]] = {
    "bare torch": bare,
    "hasten": hasten,
    "Accelerate": accelerate,
    "Fabric": fabric,
}


# -- timing -----------------------------------------------------------------------------------------------------------
def build(case: Case, device: torch.device, only: list[str]) -> dict[str, Step]:
    steps = {}
    for name, make in CONTENDERS.items():
        if only and name not in only:
            continue
        try:
            with computing() as seen:
                steps[name] = make(case, device)
                for i in range(case.every * 2):
                    steps[name](i)
            if case.precision != "no" and DTYPES[case.precision] not in seen:
                raise RuntimeError(f"asked for {case.precision}, it computes in {', '.join(map(str, seen))}")
        except Exception as error:
            if name in ("bare torch", "hasten"):
                raise
            print(f"  {name} left out: {type(error).__name__}: {str(error).splitlines()[0][:150]}", file=sys.stderr)
            steps.pop(name, None)
    return steps


def measure(case: Case, device: torch.device, steps: dict[str, Step], rounds: int, block: int) -> dict[str, Any]:
    """Rounds of turns: the seconds one step took in each."""
    sync = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    # on a CPU, time spent by the process (all its threads): other programs on the machine do not count
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    gc.collect()
    gc.disable()
    for turn in range(rounds + 3):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            step = steps[name]
            sync()
            begin = clock()
            for i in range(block):
                step(i)
            sync()
            if turn >= 3:
                times[name].append((clock() - begin) / block)
    gc.enable()
    reference = times["bare torch"]
    return {
        name: {
            "microseconds": statistics.median(seconds) * 1e6,
            "ratio": statistics.median(a / b for a, b in zip(seconds, reference, strict=True)),
            "ratio_spread": [
                round(q, 4) for q in statistics.quantiles([a / b for a, b in zip(seconds, reference, strict=True)], n=4)
            ],
        }
        for name, seconds in times.items()
    }


def sizes(case: Case, device: torch.device, quick: bool) -> tuple[int, int]:
    """How many rounds, and steps in a turn: turns of a few tens of milliseconds."""
    if case.model.startswith("gpt"):
        return (4, 3) if quick else (12, 5)
    if case.processes > 1:
        return (20, 20) if quick else (60, 20)
    return (20, 40) if quick else (100, 30)


def run_case(case: Case, args: argparse.Namespace) -> dict[str, Any] | None:
    """The case, in this process."""
    warnings.filterwarnings("ignore")
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.backends.cuda.matmul.allow_tf32 = True
    if case.processes > 1:
        torch.distributed.init_process_group("gloo")
    steps = build(case, device, args.only)
    table = measure(case, device, steps, *sizes(case, device, args.quick))
    if case.model.startswith("gpt"):
        for row in table.values():
            row["tokens_per_second"] = 16 * 1024 / (row["microseconds"] / 1e6)
    return {"case": case.name, "contenders": table}


# -- processes --------------------------------------------------------------------------------------------------------
def spawn(case: Case, args: argparse.Namespace) -> dict[str, Any] | None:
    """The case, in fresh processes; what its rank 0 printed last."""
    command = [sys.executable, __file__, "--device", args.device, "--case", case.name]
    command += ["--quick"] * args.quick + [word for name in args.only for word in ("--only", name)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = []
    for rank in range(case.processes):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.processes, "LOCAL_WORLD_SIZE": case.processes}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "bench"}
        extra = {key: str(value) for key, value in place.items()} if case.processes > 1 else {}
        env = {**os.environ, "OMP_NUM_THREADS": "1", **extra}
        workers.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    outputs = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        print(f"{case.name}: failed", file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return found


def versions(device: str) -> dict[str, str]:
    known = {"python": platform.python_version(), "torch": torch.__version__, "cores": str(os.cpu_count())}
    known["hasten"] = hasten_version
    for name in ("accelerate", "lightning"):
        try:
            known[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    known["hardware"] = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
    return known


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def markdown(results: list[dict[str, Any]], known: dict[str, str], device: str) -> str:
    spent = "of processor time" if device == "cpu" else "on the clock"
    how = f"Median microseconds {spent} per (micro-)step, and the median ratio to bare torch in the same rounds."
    names = [name for name in CONTENDERS if any(name in r["contenders"] for r in results)]
    lines = ["# Cost of a training step", "", ", ".join(f"{key} {value}" for key, value in known.items()), ""]
    lines += [how, ""]
    lines += ["| step | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for result in results:
        cells = []
        for name in names:
            row = result["contenders"].get(name)
            if row is None:
                cells.append("–")
                continue
            speed = f", {row['tokens_per_second'] / 1e3:.0f} ktok/s" if "tokens_per_second" in row else ""
            cells.append(f"{row['microseconds']:.0f} µs (× {row['ratio']:.3f}{speed})")
        lines.append(f"| {result['case']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--case", help="run this one case here and print JSON")
    parser.add_argument("--cases", nargs="*", help="only cases whose name contains one of these")
    parser.add_argument("--only", action="append", default=[], help="only this contender (repeat)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    cases = (*TINY, *DDP) if args.device == "cpu" else (*TINY, *GPT)
    if args.case:
        print(json.dumps(run_case(next(c for c in cases if c.name == args.case), args)))
        return
    chosen = [c for c in cases if not args.cases or any(word in c.name for word in args.cases)]
    results: list[dict[str, Any]] = []
    known = {**versions(args.device), "date": datetime.now(UTC).strftime("%Y-%m-%d")}
    for case in chosen:
        result = spawn(case, args)
        if result is None:
            continue
        rows = [f"{n} {r['microseconds']:.1f} µs (x {r['ratio']:.3f})" for n, r in result["contenders"].items()]
        print(f"{case.name}: {', '.join(rows)}", flush=True)
        results.append(result)
        page = markdown(results, known, args.device)
        record("step_overhead", args.device, {"results": results}, page, known, args.out)


if __name__ == "__main__":
    main()
