"""How near `hasten plan` comes: predicted and measured peak memory and step time of models of transformers, at random weights.

    python benchmarks/plan_accuracy.py --device cuda --gpu h200     # one GPU, minutes
    python benchmarks/plan_accuracy.py --device cpu                 # tiny models, to see that it runs

Traces are made first, each in a process of its own and all at once, before the device is touched; then every case is trained for
some steps. Times are compared as the table of hardware predicts them, and after calibration on the first case: the efficiencies of
the table scaled by one factor, and the pace at which the host starts operations, from steps of the same model so short that the GPU
waits for it. On the CPU, which has no counter of allocated memory, "measured" is what a real step keeps alive,
counted tensor by tensor, and times say nothing. A case that fails is named with its error, and the others run all the same; after
--budget seconds the remaining ones are left out. Results go to benchmarks/results (or --out) as JSON and Markdown, written
again after every case.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from recording import RESULTS, record_run
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
)

from hasten import Accelerator
from hasten.extensions.planning.plan import hardware
from hasten.extensions.planning.plan.gpu_rules import use_gpu_rules
from hasten.extensions.planning.plan.memory import predict_memory
from hasten.extensions.planning.plan.speed import predict_time
from hasten.extensions.planning.plan.trace import trace_step
from hasten.extensions.planning.plan.traced import Candidate, ModelTrace, PrecisionName
from hasten.extensions.planning.plan.watch import StepWatch
from hasten.runtime.mesh_plan import MeshSpec

WARM_UP = 3
STEPS = 10
SHORT = 16
"""Tokens of a sequence with which the GPU waits for the host."""
Sample = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One model and one way to train it."""

    model: str
    batch: int
    precision: PrecisionName = "bf16"
    recompute: bool = False
    optimizer: str = "AdamW"
    sharded: bool = False

    @property
    def name(self) -> str:
        extras = [
            word
            for word, on in (("recompute", self.recompute), ("FSDP2", self.sharded))
            if on
        ]
        return ", ".join(
            [
                f"{self.model} x {self.batch}",
                {"no": "fp32"}.get(self.precision, self.precision),
                self.optimizer,
                *extras,
            ]
        )


CASES = (
    Case("gpt2", 16),
    Case("gpt2", 8, "no"),
    Case("gpt2", 16, recompute=True),
    Case("gpt2", 16, optimizer="SGD"),
    Case("gpt2-medium", 8),
    Case("gpt2-medium", 8, recompute=True),
    Case("gpt2-large", 4),
    Case("gpt2-large", 4, "no", optimizer="SGD"),
    Case("vit-large", 32),
    Case("vit-large", 32, "no"),
    Case("bert", 32),
    Case("bert", 32, recompute=True, optimizer="SGD"),
    Case("gpt2", 16, sharded=True),
    Case("gpt2-large", 8, recompute=True, sharded=True),
)
TINY = (Case("gpt2", 8), Case("gpt2", 8, "no"), Case("gpt2", 8, optimizer="SGD"))


def build_case(case: Case, tiny: bool) -> tuple[Callable[[], nn.Module], Sample]:
    """What makes the model, and one sample."""
    generator = torch.Generator().manual_seed(0)
    sizes = {
        "gpt2": (768, 12, 12),
        "gpt2-medium": (1024, 24, 16),
        "gpt2-large": (1280, 36, 20),
    }
    if case.model in sizes:
        width, depth, heads = (32, 2, 2) if tiny else sizes[case.model]
        short = {"vocab_size": 64, "n_positions": 32} if tiny else {}
        config = GPT2Config(
            use_cache=False, n_embd=width, n_layer=depth, n_head=heads, **short
        )
        tokens = torch.randint(
            0, config.vocab_size, (config.n_positions,), generator=generator
        )
        return (lambda: GPT2LMHeadModel(config)), {
            "input_ids": tokens,
            "labels": tokens,
        }  # type: ignore[no-untyped-call]
    config_sizes = (
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
        }
        if tiny
        else {}
    )
    if case.model == "vit-large":
        large = {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        }
        vision = ViTConfig(**(config_sizes or large))
        vision.num_labels = 1000
        pixels = torch.randn(3, 224, 224, generator=generator)
        return (lambda: ViTForImageClassification(vision)), {
            "pixel_values": pixels,
            "labels": torch.tensor(1),
        }
    words = BertConfig(**config_sizes)
    tokens = torch.randint(
        0, words.vocab_size, (64 if tiny else 512,), generator=generator
    )
    return (lambda: BertForMaskedLM(words)), {"input_ids": tokens, "labels": tokens}  # type: ignore[no-untyped-call]


class Rows(Dataset[Any]):
    """One sample, as often as asked for."""

    def __init__(self, sample: Sample, number: int) -> None:
        self.sample, self.number = sample, number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Sample:
        return self.sample


def train_case(
    case: Case,
    tiny: bool,
    device: str,
    num_steps: int,
    after_step: Callable[[nn.Module, Any], None],
    length: int | None = None,
) -> None:
    """Train a case for some steps, on sequences of so many tokens; `after_step` is called behind each with the model and the optimizer."""
    blocks = {"vit-large": ("ViTLayer",), "bert": ("BertLayer",)}.get(
        case.model, ("GPT2Block",)
    )
    accelerator = Accelerator(
        mixed_precision=case.precision,
        cpu=device == "cpu",
        strategy="fsdp" if case.sharded else "none",
        recompute=blocks if case.recompute else (),
    )
    torch.manual_seed(0)
    make, sample = build_case(case, tiny)
    # drawn there: a CPU takes most of a minute
    with torch.device(device) if device == "cuda" else nullcontext():
        model = make()
    kind = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}[case.optimizer]
    optimizer: Any = kind(model.parameters(), lr=1e-4)
    if length is not None:
        sample = {name: value[:length] for name, value in sample.items()}
    loader = DataLoader(Rows(sample, case.batch * num_steps), batch_size=case.batch)
    # no time is spent on joining samples: a plan is about the step
    if device == "cuda":
        batch = {
            name: torch.stack([value] * case.batch) for name, value in sample.items()
        }
        loader = DataLoader(Rows(batch, num_steps), batch_size=None)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        del loss
        after_step(model, optimizer)
    accelerator.end_training()


def measure_step(
    case: Case, tiny: bool, length: int | None = None
) -> tuple[float, float]:
    """Peak bytes and seconds a step on the GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    initial_bytes = torch.cuda.memory_allocated()
    marks: list[float] = []

    def mark_step(model: nn.Module, optimizer: Any) -> None:
        if len(marks) == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        marks.append(time.perf_counter())

    train_case(case, tiny, "cuda", WARM_UP + STEPS, mark_step, length)
    times = [b - a for a, b in zip(marks[WARM_UP:], marks[WARM_UP + 1 :], strict=False)]
    return float(torch.cuda.max_memory_allocated() - initial_bytes), statistics.median(
        times
    )


def count_step(case: Case, tiny: bool) -> tuple[float, float]:
    """Bytes that a real step on the CPU keeps alive at most, and its seconds."""
    make, sample = build_case(case, tiny)
    model = make().train()
    batch = {name: torch.stack([value] * case.batch) for name, value in sample.items()}
    kind = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}[case.optimizer]
    optimizer: Any = kind(model.parameters(), lr=1e-4, foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # so that its state is there
    optimizer.zero_grad()
    state_bytes = sum(p.numel() * p.element_size() for p in model.parameters()) * (
        3 if case.optimizer == "AdamW" else 1
    )
    watch = StepWatch([model])
    start = time.perf_counter()
    with watch.hooks(), use_gpu_rules(lambda *_: None), watch:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16"):
            loss = model(**batch).loss
        loss.backward()
        del loss
        optimizer.step()
    return state_bytes + max(
        map(sum, watch.measured.alive)
    ), time.perf_counter() - start


def trace_of(
    model: str, precision: PrecisionName, optimizer: str, tiny: bool
) -> ModelTrace:
    """The trace behind the predictions of all cases of this kind."""
    case = Case(model, 2, precision, optimizer=optimizer)
    return trace_step(
        lambda: train_case(case, tiny, "cpu", 1, lambda *_: None), model, (precision,)
    )


def traces_of(
    cases: Sequence[Case], tiny: bool
) -> dict[tuple[str, str, str], ModelTrace | str]:
    """The traces of all cases, each made by a process of its own; what went wrong stands in the place of a trace."""
    keys = list(
        dict.fromkeys((case.model, case.precision, case.optimizer) for case in cases)
    )
    traces: dict[tuple[str, str, str], ModelTrace | str] = {}
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    at_once = max(1, (os.cpu_count() or 1) // 2)
    with tempfile.TemporaryDirectory() as folder:
        waiting, running = list(enumerate(keys)), []
        while waiting or running:
            while waiting and len(running) < at_once:
                number, key = waiting.pop(0)
                target = Path(folder) / f"{number}.json"
                device = ["--device", "cpu" if tiny else "cuda"]
                command = [
                    sys.executable,
                    __file__,
                    "--trace",
                    *key,
                    str(target),
                    *device,
                ]
                process = subprocess.Popen(
                    command,
                    env={**os.environ, **hidden},
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                running.append((key, target, process))
            key, target, process = running.pop(0)
            error_lines = process.communicate()[1].strip().splitlines()
            if target.is_file():
                traces[key] = msgspec.json.decode(target.read_bytes(), type=ModelTrace)
            else:
                traces[key] = (
                    f"no trace: {error_lines[-1] if error_lines else process.returncode}"
                )
    return traces


def compare_case(
    case: Case,
    traced: ModelTrace,
    card: hardware.AcceleratorEntry,
    tiny: bool,
    calibrated: hardware.AcceleratorEntry | None,
) -> tuple[dict[str, Any], hardware.AcceleratorEntry]:
    """Prediction and measurement of one case, and the card calibrated: as given, or on this case."""
    candidate = Candidate(
        mesh=MeshSpec(),
        sharded=case.sharded,
        precision=case.precision,
        recompute=case.recompute,
        micro_batch=case.batch,
    )
    expected, predicted = (
        predict_memory(traced, candidate),
        predict_time(traced, candidate, card),
    )
    peak, step = (count_step if tiny else measure_step)(case, tiny)
    if calibrated is None:
        factor = step / predicted.total
        calibrated = replace(
            card,
            matmul_share=card.matmul_share / factor,
            memory_share=card.memory_share / factor,
            fp32_share=card.fp32_share / factor,
            launch_us=card.launch_us * factor
            if tiny
            else launch_pace(case, traced, predicted.update * factor),
        )
    row = {
        "case": case.name,
        "predicted_bytes": expected.peak,
        "measured_bytes": peak,
        "predicted_s": predicted.total,
        "calibrated_s": predict_time(traced, candidate, calibrated).total,
        "measured_s": step,
        "launch_us": calibrated.launch_us,
    }
    return row, calibrated


def launch_pace(case: Case, traced: ModelTrace, update_s: float) -> float:
    """Microseconds in which the host starts one operation, from steps in which the GPU waits for it."""
    variant = traced.variant(case.precision, case.recompute)
    assert variant is not None, "the case was traced"
    _, step = measure_step(replace(case, batch=1), False, SHORT)
    return max(step - update_s, 0.0) / variant.operations * 1e6


def main() -> None:
    """Trace all kinds, measure all cases, write the table."""
    parser = argparse.ArgumentParser(
        description="Predicted and measured memory and time of training steps."
    )
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda" if torch.cuda.is_available() else "cpu",
    )
    parser.add_argument("--gpu", default="h200", help="the entry of the hardware table")
    parser.add_argument("--only", nargs="*", help="models to run")
    parser.add_argument(
        "--budget",
        type=float,
        default=240.0,
        help="seconds after which no further case begins",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--trace",
        nargs=4,
        metavar=("MODEL", "PRECISION", "OPTIMIZER", "FILE"),
        help=argparse.SUPPRESS,
    )
    args = parser.parse_args()
    tiny = args.device == "cpu"
    if args.trace:
        model, precision, optimizer, target = args.trace
        Path(target).write_bytes(
            msgspec.json.encode(trace_of(model, precision, optimizer, tiny))
        )
        return
    deadline = time.monotonic() + args.budget
    cases = [
        case
        for case in (TINY if tiny else CASES)
        if not args.only or case.model in args.only
    ]
    traces = traces_of(cases, tiny)
    print(
        f"traced after {args.budget - (deadline - time.monotonic()):.0f} s", flush=True
    )
    table: list[dict[str, Any]] = []
    card, calibrated = hardware.find_accelerator(args.gpu), None
    for case in cases:
        traced = traces[case.model, case.precision, case.optimizer]
        try:
            if isinstance(traced, str):
                raise RuntimeError(traced)
            if time.monotonic() > deadline:
                raise TimeoutError(f"not begun within {args.budget:.0f} s")
            row, calibrated = compare_case(case, traced, card, tiny, calibrated)
        # of any kind: the page names it, and the other cases run all the same
        except Exception as error:
            first = (str(error).strip().splitlines() or ["no message"])[0]
            row = {"case": case.name, "error": f"{type(error).__name__}: {first}"}
        table.append(row)
        print(json.dumps(row), flush=True)
        page = write_results(table, args.device, args.gpu, args.out)
    print(page)


def write_results(
    table: list[dict[str, Any]], device: str, gpu: str, folder: Path
) -> str:
    """Record the numbers and return the page."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU, tiny models"
    paces = [row["launch_us"] for row in table if "launch_us" in row] or [0.0]
    lines = [
        f"# Plan and measurement, {name}, torch {torch.__version__}",
        "",
        f"Hardware entry `{gpu}`; times calibrated on the first case; this host starts an operation in {paces[0]:.1f} µs.",
        "",
        "| case | predicted memory | measured | error | predicted step | calibrated | measured | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in table:
        if "error" in row:
            lines.append(f"| {row['case']} | {row['error']} | | | | | | |")
            continue
        memory = row["predicted_bytes"] / row["measured_bytes"] - 1
        step = row["calibrated_s"] / row["measured_s"] - 1
        lines.append(
            f"| {row['case']} | {row['predicted_bytes'] / 2**30:.3f} GiB | {row['measured_bytes'] / 2**30:.3f} GiB | {memory:+.1%} "
            f"| {row['predicted_s'] * 1e3:.2f} ms | {row['calibrated_s'] * 1e3:.2f} ms | {row['measured_s'] * 1e3:.2f} ms | {step:+.1%} |"
        )
    page = "\n".join(lines)
    record_run(
        "plan_accuracy",
        device,
        table,
        page,
        {"torch": torch.__version__, "hardware": name},
        folder,
    )
    return page


if __name__ == "__main__":
    main()
