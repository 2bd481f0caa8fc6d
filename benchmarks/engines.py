"""Engines beside the native path on one device: a GPT-2-small-sized model, its tokens a second and its losses.

    PYTHONPATH=src python benchmarks/engines.py --device cuda --only megatron      # one GPU, about three minutes
    PYTHONPATH=src python benchmarks/engines.py --device cuda --only deepspeed     # one GPU, about ten minutes
    PYTHONPATH=src python benchmarks/engines.py                                    # a tiny model on the CPU, to see that it runs

Needs transformers and megatron-core 0.16 (an unpacked wheel on PYTHONPATH will do; it needs no package beyond torch, numpy and packaging).
DeepSpeed takes part where it is installed, with its parameters on the GPU, in host memory and in a temporary folder of the drive; the last
needs a library that DeepSpeed compiles (libaio-dev, g++, ninja). Every contender trains the same transformers model from the same weights on the same
batches: first its losses, alone and with deterministic algorithms, with its peak of memory; then it is saved, goes on, and is loaded and goes on again; then its
speed in turns. A contender that fails is named with its traceback, and the others go on. Results go to benchmarks/results (or --out).

On the CPU megatron-core runs through the stand-in for torch.cuda that the tests use, so its speed there means nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.util
import math
import os
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from loading import installed_versions
from recording import RESULTS, record_run
from torch import Tensor

from hasten import Accelerator

NOISE = 0.1
"""Share of tokens that are drawn at random."""
NUM_USED_TOKENS = 1000


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


SMALL = Size("GPT-2-small-sized", 50304, 1024, 768, 12, 12, 16, 24, 8)
TINY = Size("tiny", 64, 16, 32, 2, 4, 4, 6, 2)
TURN = 4
IN_MEMORY = "parameters and state in host memory"
ON_DRIVE = "parameters on the drive"
STAND_IN = (
    Path(__file__).parent.parent
    / "tests"
    / "extensions"
    / "megatron"
    / "megatron_on_cpu.py"
)
Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Contender:
    """One way to train the model."""

    name: str
    precision: str
    settings: dict[str, Any] = field(default_factory=dict)
    package: str | None = None
    """The distribution it needs beside torch and transformers."""
    scheduled: bool = False
    """Forward and backward are run by the engine's own schedule."""
    bare: dict[str, Any] | None = None
    """DeepSpeed's settings where it is called without hasten."""


def draw_batches(size: Size, num_batches: int, device: torch.device) -> list[Tensor]:
    """Return batches in which a token decides the next one, but for one in ten, which is drawn at random."""
    generator = torch.Generator().manual_seed(1)
    num_tokens = min(size.vocabulary, NUM_USED_TOKENS)
    next_tokens = torch.randperm(num_tokens, generator=generator)
    batches = []
    for _ in range(num_batches):
        tokens = torch.empty(size.rows, size.length + 1, dtype=torch.int64)
        tokens[:, 0] = torch.randint(num_tokens, (size.rows,), generator=generator)
        for position in range(1, size.length + 1):
            drawn_tokens = torch.randint(num_tokens, (size.rows,), generator=generator)
            is_random = torch.rand(size.rows, generator=generator) < NOISE
            ruled_tokens = next_tokens[tokens[:, position - 1]]
            tokens[:, position] = torch.where(is_random, drawn_tokens, ruled_tokens)
        batches.append(tokens.to(device))
    return batches


def compute_loss_floor(size: Size) -> float:
    """Return the loss of a model that knows the rule."""
    num_tokens = min(size.vocabulary, NUM_USED_TOKENS)
    share_of_each = NOISE / num_tokens
    share_of_rule = 1 - NOISE + share_of_each
    others = (num_tokens - 1) * share_of_each * math.log(share_of_each)
    return -share_of_rule * math.log(share_of_rule) - others


def list_contenders(drive: Path) -> list[Contender]:
    """All of them; those that offload to a drive write to this folder."""
    memory, files = {"device": "cpu"}, {"device": "nvme", "nvme_path": str(drive)}
    all_contenders = []
    for precision in ("bf16", "no"):
        name = "fp32" if precision == "no" else precision
        engine = {
            "strategy": "megatron",
            "megatron_lm_plugin": {"num_micro_batches": 1},
        }
        recomputed_attention = {
            "strategy": "megatron",
            "megatron_lm_plugin": {"recompute_activations": True},
        }
        all_contenders += [
            Contender(f"native, {name}", precision, {"strategy": "none"}),
            Contender(
                f"Megatron, {name}", precision, engine, "megatron-core", scheduled=True
            ),
            Contender(
                f"Megatron, {name}, attention recomputed",
                precision,
                recomputed_attention,
                "megatron-core",
                scheduled=True,
            ),
            Contender(
                f"DeepSpeed ZeRO 1, {name}",
                precision,
                zero_settings(stage=1),
                "deepspeed",
            ),
            Contender(
                f"bare DeepSpeed ZeRO 1, {name}",
                precision,
                package="deepspeed",
                bare={"stage": 1},
            ),
            Contender(
                f"DeepSpeed ZeRO 3, {name}",
                precision,
                zero_settings(stage=3),
                "deepspeed",
            ),
            Contender(
                f"bare DeepSpeed ZeRO 3, {name}",
                precision,
                package="deepspeed",
                bare={"stage": 3},
            ),
            Contender(
                f"DeepSpeed ZeRO 3, {name}, {IN_MEMORY}",
                precision,
                offload_settings(memory, memory),
                "deepspeed",
            ),
            Contender(
                f"DeepSpeed ZeRO 3, {name}, {ON_DRIVE}",
                precision,
                offload_settings(files, memory),
                "deepspeed",
            ),
        ]
    return all_contenders


def zero_settings(**options: Any) -> dict[str, Any]:
    return {
        "strategy": "deepspeed",
        "deepspeed_plugin": {"hf_ds_config": {"zero_optimization": options}},
    }


def offload_settings(
    parameters: dict[str, str], state: dict[str, str]
) -> dict[str, Any]:
    return zero_settings(stage=3, offload_param=parameters, offload_optimizer=state)


# -- what is trained --------------------------------------------------------------------------------------------------
# Any: a model of transformers
def language_model(size: Size, device: torch.device) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=size.vocabulary,
        n_positions=size.length,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config).to(device)


# Any: a model of transformers, a batch of its inputs
def loss_of(model: Any, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def bare_training(
    contender: Contender, size: Size, device: torch.device, fused: bool
) -> Step:
    """One step of DeepSpeed without hasten, in the process group that an Accelerator has made."""
    import deepspeed

    model = language_model(size, device)
    config = {
        "train_micro_batch_size_per_gpu": size.rows,
        "bf16": {"enabled": contender.precision == "bf16"},
        "gradient_clipping": 1.0,
        "zero_optimization": contender.bare,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=fused)
    with mock.patch.dict(os.environ, LOCAL_RANK="0"):
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(engine, {"input_ids": tokens[:, :-1], "labels": tokens[:, :-1]})
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def start_training(
    contender: Contender, size: Size, device: torch.device, fused: bool
) -> tuple[Step, Accelerator | None]:
    """One step of the contender, which takes a batch and gives its loss, and what it runs on, if that is hasten."""
    if contender.bare is not None:
        return bare_training(contender, size, device, fused), None
    accelerator = Accelerator(
        mixed_precision=contender.precision,
        cpu=device.type == "cpu" and not contender.scheduled,
        **contender.settings,
    )
    model = language_model(size, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=fused)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(tokens: Tensor) -> Tensor:
        batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, :-1]}
        if contender.scheduled:
            loss = accelerator.forward_backward(model, batch, loss_of)
        else:
            loss = loss_of(model, batch)
            accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, accelerator


def resume_difference(
    step: Step, accelerator: Accelerator, batches: list[Tensor]
) -> float:
    """The largest distance of a loss after loading the state to the one after saving it; 0 is bit for bit."""
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(Path(folder) / "state")
        first = [step(batch) for batch in batches]
        accelerator.load_state(Path(folder) / "state")
        repeated_losses = [step(batch) for batch in batches]
    return float((torch.stack(first) - torch.stack(repeated_losses)).abs().max())


# -- measuring --------------------------------------------------------------------------------------------------------
def losses_of(
    contender: Contender,
    size: Size,
    device: torch.device,
    batches: list[Tensor],
    fused: bool,
) -> tuple[Step, dict[str, Any]]:
    """The contender's step, and its losses with the peak of memory that it added."""
    on_gpu = device.type == "cuda"
    initial_bytes = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    start_time = time.perf_counter()
    step, accelerator = start_training(contender, size, device, fused)
    values = torch.stack([step(batch) for batch in batches]).float().tolist()
    row: dict[str, Any] = {
        "contender": contender.name,
        "first loss": values[0],
        "last loss": values[-1],
    }
    row["losses"] = values
    row["seconds with set-up"] = round(time.perf_counter() - start_time, 1)
    row["peak GiB"] = (
        (torch.cuda.max_memory_allocated() - initial_bytes) / 2**30 if on_gpu else None
    )
    row["resumed"] = (
        None
        if accelerator is None
        else resume_difference(step, accelerator, batches[:4])
    )
    return step, row


def take_turns(
    steps: dict[str, Step], size: Size, batches: list[Tensor], failed: dict[str, str]
) -> dict[str, list[float]]:
    """Seconds a step of every round, contenders in turns and every other round in reverse order."""
    sync = torch.cuda.synchronize if batches[0].is_cuda else (lambda: None)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(size.turns):
        for name in list(steps)[:: -1 if number % 2 else 1]:
            if name in failed:
                continue
            try:
                sync()
                start_time = time.perf_counter()
                for index in range(TURN):
                    steps[name](batches[index % len(batches)])
                sync()
                times[name].append((time.perf_counter() - start_time) / TURN)
            # one contender's failure is its own; it is named in the results
            except Exception:
                failed[name] = traceback.format_exc()
                print(f"{name} failed in turn {number}:\n{failed[name]}", flush=True)
    return times


def farthest_loss(row: dict[str, Any], rows: list[dict[str, Any]]) -> float | None:
    """The largest distance of a loss to the native run's of the same precision."""
    kind = row["contender"].split(", ")[1]
    base = next(
        (
            candidate_row
            for candidate_row in rows
            if candidate_row["contender"] == f"native, {kind}"
        ),
        None,
    )
    if base is None:
        return None
    return max(abs(a - b) for a, b in zip(row["losses"], base["losses"], strict=True))


def offload_is_exact(rows: list[dict[str, Any]]) -> list[str]:
    """Whether losses with the parameters on the drive are those with both in host memory, in one line for each."""
    lines = []
    for row in rows:
        name = row["contender"]
        where = name.split(", ", 2)[-1]
        base = next(
            (
                candidate_row
                for candidate_row in rows
                if candidate_row["contender"] == name.replace(where, IN_MEMORY)
            ),
            None,
        )
        if where == ON_DRIVE and base is not None:
            is_equal = row["losses"] == base["losses"]
            lines.append(
                f"- {name}: losses {'equal, bit for bit, to' if is_equal else 'DIFFERENT from'} those with {IN_MEMORY}."
            )
    return lines


def over_bare(rows: list[dict[str, Any]]) -> list[str]:
    """How much longer a step takes with hasten than with the engine alone, by rounds, in one line for each pair."""
    lines = []
    for row in rows:
        base = next(
            (
                candidate_row
                for candidate_row in rows
                if candidate_row["contender"] == f"bare {row['contender']}"
            ),
            None,
        )
        if base is not None and len(row.get("seconds", [])) > 1:
            ratios = [
                engine_s / bare_s
                for engine_s, bare_s in zip(
                    row["seconds"], base["seconds"], strict=False
                )
            ]
            low, middle, high = statistics.quantiles(ratios, n=4)
            lines.append(
                f"- {row['contender']}: a step takes {middle:.3f} × as long as without hasten ({low:.3f} to {high:.3f})."
            )
    return lines


def format_page(measurements: dict[str, Any]) -> str:
    def format_number(value: float | None, digits: int, scale: float = 1.0) -> str:
        return "" if value is None else f"{value * scale:.{digits}f}"

    lines = [
        f"# Engines beside the native path, {measurements['model']}",
        "",
        ", ".join(f"{key} {value}" for key, value in measurements["versions"].items()),
        "",
        f"{measurements['parameters'] / 1e6:.0f} M parameters, {measurements['tokens']} tokens a step, AdamW{' (fused)' if measurements['fused'] else ''}, "
        f"clipping, world of one; {measurements['steps']} losses from the same weights on the same batches (a model that knows the rule of "
        f"the data reaches {measurements['floor']:.3f}). Speed: median of {measurements['turns']} interleaved turns of {TURN} steps, by the clock; the ratio "
        "and its quartiles are those of single rounds, to the native run of the same precision. Peak memory is what the contender added.",
        "",
        "| | ktok/s | × native | quartiles | peak GiB | first loss | last loss | farthest from native | resumed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in measurements["rows"]:
        quartiles = row.get("quartiles")
        cells = [
            row["contender"],
            format_number(row.get("tokens a second"), 1, 1e-3),
            format_number(row.get("ratio"), 3),
            f"{quartiles[0]:.2f}–{quartiles[1]:.2f}" if quartiles else "",
            format_number(row["peak GiB"], 2),
            format_number(row["first loss"], 4),
            format_number(row["last loss"], 4),
            format_number(farthest_loss(row, measurements["rows"]), 5),
            ""
            if row["resumed"] is None
            else "bit for bit"
            if row["resumed"] == 0
            else f"{row['resumed']:.1e}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        *over_bare(measurements["rows"]),
        *offload_is_exact(measurements["rows"]),
    ]
    lines += [
        "",
        *(
            f"Left out: {name} ({why})."
            for name, why in measurements["left out"].items()
        ),
    ]
    for name, text in measurements["failed"].items():
        lines += ["", f"## {name} failed", "", "```", text.rstrip(), "```"]
    return "\n".join(lines).rstrip() + "\n"


def with_speed(
    rows: list[dict[str, Any]], times: dict[str, list[float]], tokens: int
) -> None:
    """Add medians and ratios to the native run of the same precision, by rounds."""
    for row in rows:
        name = row["contender"]
        step_seconds = times.get(name, [])
        base = times.get(f"native, {name.split(', ')[1]}", [])
        if not step_seconds:
            continue
        row["seconds"] = step_seconds
        row["ms a step"] = statistics.median(step_seconds) * 1e3
        row["tokens a second"] = tokens / statistics.median(step_seconds)
        # a failed run has fewer rounds
        ratios = [
            native_s / round_s
            for round_s, native_s in zip(step_seconds, base, strict=False)
        ]
        if len(ratios) > 1:
            low, middle, high = statistics.quantiles(ratios, n=4)
            row["ratio"], row["quartiles"] = middle, [low, high]


def stand_in(stack: ExitStack) -> None:
    """Let megatron-core run on the CPU until the stack is left."""
    spec = importlib.util.spec_from_file_location("megatron_on_cpu", STAND_IN)
    assert spec is not None, STAND_IN
    assert spec.loader is not None, STAND_IN
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stack.enter_context(module.megatron_on_cpu())


def missing_reason(contender: Contender) -> str | None:
    """Why the contender cannot take part, or None."""
    if contender.package is None:
        return None
    try:
        metadata.version(contender.package)
    except metadata.PackageNotFoundError:
        return f"{contender.package} is not installed"
    return None


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
        "--only",
        choices=["megatron", "deepspeed"],
        help="this engine beside the native path",
    )
    parser.add_argument("--precision", choices=["bf16", "fp32"], help="only this one")
    parser.add_argument(
        "--without",
        nargs="*",
        default=[],
        help="leave contenders out whose names have one of these words",
    )
    parser.add_argument("--turns", type=int, help="turns of each contender")
    parser.add_argument("--rows", type=int, default=None, help="sequences of a batch")
    parser.add_argument(
        "--not-fused", action="store_true", help="AdamW without torch's fused kernel"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    # as deterministic algorithms need it
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = torch.device(args.device)
    size = SMALL if args.device == "cuda" else TINY
    overrides = {
        name: value
        for name, value in (("rows", args.rows), ("turns", args.turns))
        if value
    }
    size = dataclasses.replace(size, **overrides)
    fused = args.device == "cuda" and not args.not_fused
    batches = draw_batches(size, size.losses, device)
    count = sum(
        p.numel() for p in language_model(size, torch.device("meta")).parameters()
    )
    measurements: dict[str, Any] = {
        "model": size.name,
        "versions": installed_versions(args.device),
        "parameters": count,
    }
    measurements |= {
        "tokens": size.rows * size.length,
        "floor": compute_loss_floor(size),
        "steps": size.losses,
        "turns": size.turns,
    }
    measurements |= {"fused": fused, "rows": [], "left out": {}, "failed": {}}
    for name in ("transformers", "megatron-core", "deepspeed"):
        if not missing_reason(Contender(name, "no", package=name)):
            measurements["versions"][name] = metadata.version(name)
    setting = ", ".join([*([args.only] if args.only else []), args.device])
    steps: dict[str, Step] = {}
    with ExitStack() as stack:
        if args.device == "cpu":
            torch.set_num_threads(1)
            if "megatron-core" in measurements["versions"]:
                stand_in(stack)
        drive = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        torch.use_deterministic_algorithms(True)
        for contender in list_contenders(drive):
            if (
                args.only
                and contender.package
                and not contender.package.startswith(args.only)
            ):
                continue
            if args.precision and args.precision not in contender.name:
                continue
            if any(word in contender.name for word in args.without):
                continue
            if (why := missing_reason(contender)) is not None:
                measurements["left out"][contender.name] = why
                continue
            try:
                steps[contender.name], row = losses_of(
                    contender, size, device, batches, fused
                )
                measurements["rows"].append(row)
                print(
                    f"{contender.name}: loss {row['first loss']:.4f} to {row['last loss']:.4f}",
                    flush=True,
                )
            # one contender's failure is its own; it is named in the results
            except Exception:
                measurements["failed"][contender.name] = traceback.format_exc()
                print(
                    f"{contender.name} failed:\n{measurements['failed'][contender.name]}",
                    flush=True,
                )
            gc.collect()
        record_run(
            "engines",
            setting,
            measurements,
            format_page(measurements),
            measurements.get("versions"),
            args.out,
        )
        torch.use_deterministic_algorithms(False)
        with_speed(
            measurements["rows"],
            take_turns(steps, size, batches, measurements["failed"]),
            size.rows * size.length,
        )
    record_run(
        "engines",
        setting,
        measurements,
        format_page(measurements),
        measurements.get("versions"),
        args.out,
    )


if __name__ == "__main__":
    main()
