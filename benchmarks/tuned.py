"""What `hasten tune` gains: a script tuned on this machine, beside the plain loop and the peers' best documented settings.

    python benchmarks/tuned.py --part gpt2    # one GPU, about five minutes: most of it is compiling
    python benchmarks/tuned.py --part tiny    # one GPU, about two minutes
    python benchmarks/tuned.py --small        # both, small, on a CPU: to see that it runs

First `hasten tune` runs benchmarks/tuned_script.py under candidate settings and chooses. Then everybody trains the same model from the
same weights on the same batches, in one process and in turns: the eager loop by hand, the same with a fused AdamW, hasten
with what was chosen, and each peer as its documentation says to be fast (Accelerate with `dynamo_backend="inductor"`,
Fabric on a compiled model). For the tiny step, whose time is that of the host's calls, a CUDA graph by hand is there too.
Losses of the first steps are compared with the eager loop's. Who is not installed or fails is named. Results go to
benchmarks/results (or --out) as JSON and Markdown, one pair for each part.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from loading import installed_versions
from recording import RESULTS, record_run
from torch import Tensor
from torch.utils.data import DataLoader
from tuned_script import batch_of, data_of, model_of, optimizer_of, precision_of

Step = Callable[[Any], Tensor]
BENCHMARKS_FOLDER = Path(__file__).parent
COMPARED = 24
"""Steps whose losses are compared."""
TURNS = {"gpt2": (8, 5), "tiny": (12, 200)}
"""Rounds, and steps of a contender in each."""
TRIED = {
    "gpt2": ["--only", "fused", "compile", "--updates", "15", "--warmup", "4"],
    "tiny": [
        "--only",
        "fused",
        "step_graph",
        "compile",
        "--updates",
        "400",
        "--warmup",
        "40",
    ],
}


# -- the contenders: each gives the step of a loop ----------------------------------------------------------------------
class Bench:
    """What every contender is given."""

    def __init__(
        self, kind: str, small: bool, device: torch.device, tuned_values: dict[str, Any]
    ) -> None:
        self.kind, self.small, self.device, self.chosen = (
            kind,
            small,
            device,
            tuned_values,
        )
        self.precision = precision_of(kind)

    def model(self) -> torch.nn.Module:
        return model_of(self.kind, self.small, self.device)

    def batches(self) -> list[Any]:
        loader = DataLoader(
            data_of(self.kind, self.small), batch_size=batch_of(self.kind, self.small)
        )
        return [[tensor.to(self.device) for tensor in batch] for batch in loader]


def by_hand(bench: Bench, fused: bool = False) -> Step:
    model = bench.model()
    optimizer = (
        torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        if fused
        else optimizer_of(model)
    )

    def step(batch: Any) -> Tensor:
        with torch.autocast(
            bench.device.type, torch.bfloat16, enabled=bench.precision == "bf16"
        ):
            loss: Tensor = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def fused_by_hand(bench: Bench) -> Step:
    return by_hand(bench, fused=True)


def graph_by_hand(bench: Bench) -> Step:
    """The recipe of torch's documentation: warm up on a side stream, capture, copy inputs, replay."""
    if bench.device.type != "cuda":
        raise RuntimeError("CUDA graphs need a GPU")
    if bench.kind != "tiny":
        raise RuntimeError("for the tiny step only")
    model = bench.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, capturable=True)
    graph, static, losses = (
        torch.cuda.CUDAGraph(),
        [tensor.clone() for tensor in bench.batches()[0]],
        [],
    )
    keep = [parameter.detach().clone() for parameter in model.parameters()]

    def full_step() -> Tensor:
        loss: Tensor = model(*static)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            full_step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        losses.append(full_step())
    with torch.no_grad():  # from the start again
        for parameter, first in zip(model.parameters(), keep, strict=True):
            parameter.copy_(first)
            for value in optimizer.state[parameter].values():
                value.zero_()

    def step(batch: Any) -> Tensor:
        for static_tensor, batch_tensor in zip(static, batch, strict=True):
            static_tensor.copy_(batch_tensor)
        graph.replay()
        return losses[0].clone()

    step.written_by_the_graph = (model, optimizer)  # type: ignore[attr-defined]  # a graph keeps addresses, not tensors
    return step


def with_accelerator(
    accelerator: Any,
    bench: Bench,
    change: Callable[[Any], Any] = lambda unchanged: unchanged,
) -> Step:
    """The loop for an object with Accelerate's method names."""
    net = bench.model()
    model, optimizer = accelerator.prepare(change(net), change(optimizer_of(net)))

    def step(batch: Any) -> Tensor:
        loss: Tensor = model(*batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def hasten_plain(bench: Bench) -> Step:
    from hasten import Accelerator

    return with_accelerator(
        Accelerator(mixed_precision=bench.precision, cpu=bench.device.type == "cpu"),
        bench,
    )


def hasten_tuned(bench: Bench) -> Step:
    """The values that tune chose, set as a trial of it sets them."""
    from hasten import Accelerator
    from hasten.extensions.planning.tune.trial import ScriptTrial, Spec

    trial = ScriptTrial(Spec(values=bench.chosen, result="", warmup=0, updates=0))
    settings = {"mixed_precision": bench.precision, "cpu": bench.device.type == "cpu"}
    accelerator = Accelerator(**trial.settings(settings))

    def change(script_object: Any) -> Any:
        return trial.preparing((script_object,))[0]

    return accelerator.capture_step(with_accelerator(accelerator, bench, change))


def hasten_auto(bench: Bench) -> Step:
    """Nothing tuned: `performance="auto"`."""
    from hasten import Accelerator

    accelerator = Accelerator(
        mixed_precision=bench.precision,
        cpu=bench.device.type == "cpu",
        performance="auto",
    )
    return accelerator.capture_step(with_accelerator(accelerator, bench))


def accelerate(bench: Bench) -> Step:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    if "hasten" in getattr(sys.modules["accelerate"], "__version__", ""):
        raise ImportError("the drop-in stands in for Accelerate here")
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        mixed_precision=bench.precision,
        dynamo_backend="inductor",
        cpu=bench.device.type == "cpu",
    )
    return with_accelerator(accelerator, bench)


def fabric(bench: Bench) -> Step:
    try:
        from lightning.fabric import Fabric
    except ImportError:
        from lightning_fabric import Fabric

    runner = Fabric(
        accelerator=bench.device.type,
        devices=1,
        precision="bf16-mixed" if bench.precision == "bf16" else "32-true",
    )
    runner.launch()
    net = torch.compile(bench.model())
    model, optimizer = runner.setup(net, optimizer_of(net))

    def step(batch: Any) -> Tensor:
        loss: Tensor = model(*batch)
        runner.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


CONTENDERS: dict[str, Callable[[Bench], Step]] = {
    "bare torch, eager": by_hand,
    "bare torch, eager, fused AdamW": fused_by_hand,
    "bare torch, one CUDA graph": graph_by_hand,
    "hasten, as it is": hasten_plain,
    "hasten, tuned": hasten_tuned,
    'hasten, performance="auto"': hasten_auto,
    'Accelerate, dynamo_backend="inductor"': accelerate,
    "Fabric, torch.compile": fabric,
}
REFERENCE = "bare torch, eager"


# -- tuning -----------------------------------------------------------------------------------------------------------
def run_tune(kind: str, small: bool, budget: str) -> dict[str, Any]:
    """What `hasten tune` found: its trials, what it chose, and the settings it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "config.yaml"
        command = [
            sys.executable,
            "-m",
            "hasten.cli.main",
            "tune",
            str(BENCHMARKS_FOLDER / "tuned_script.py"),
            "--json",
        ]
        command += ["--budget", budget, "-o", str(written)]
        if small:
            command += ["--only", "fused", "--updates", "6", "--warmup", "4"]
        else:
            command += TRIED[kind]
        command += ["--", "--model", kind, *(["--small"] if small else [])]
        start_time = time.monotonic()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            return {
                "error": f"hasten tune ended with exit code {done.returncode}",
                "best": {},
                "trials": [],
            }
        tune_report: dict[str, Any] = json.loads(done.stdout)
        tune_report["seconds"] = time.monotonic() - start_time
        tune_report["written"] = written.read_text() if written.is_file() else ""
        return tune_report


# -- measuring --------------------------------------------------------------------------------------------------------
def prepare_contenders(
    bench: Bench, only: list[str]
) -> tuple[dict[str, Step], dict[str, list[float]], dict[str, str]]:
    """Every contender that runs, the losses of its first steps, and why others do not."""
    steps: dict[str, Step] = {}
    losses: dict[str, list[float]] = {}
    left_out: dict[str, str] = {}
    batches = bench.batches()
    for name, make in CONTENDERS.items():
        if only and not any(word in name for word in only):
            continue
        start_time = time.monotonic()
        try:
            step = make(bench)
            loss_tensors = [step(batches[i % len(batches)]) for i in range(COMPARED)]
            losses[name] = [float(loss) for loss in loss_tensors]
            steps[name] = step
            print(
                f"  {name}: ready after {time.monotonic() - start_time:.1f} s",
                flush=True,
            )
        except Exception as error:  # of any kind: the page names it
            first = (str(error).strip().splitlines() or ["no message"])[0]
            left_out[name] = f"{type(error).__name__}: {first[:200]}"
            print(f"  {name} left out: {left_out[name]}", flush=True)
            traceback.print_exc(limit=-3)
    return steps, losses, left_out


def take_turns(bench: Bench, steps: dict[str, Step]) -> dict[str, list[float]]:
    """Seconds a step in each round; contenders alternate."""
    sync = torch.cuda.synchronize if bench.device.type == "cuda" else (lambda: None)
    rounds, block = (2, 3) if bench.small else TURNS[bench.kind]
    batches, names = bench.batches(), list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds + 1):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                step = steps[name]
                step(batches[0])
                sync()
                start_time = time.perf_counter()
                for i in range(block):
                    step(batches[i % len(batches)])
                sync()
                if turn:
                    times[name].append((time.perf_counter() - start_time) / block)
    finally:
        gc.enable()
    return times


def largest_difference(losses: list[float], reference: list[float]) -> float:
    """The largest relative difference of two loss curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


def measure_part(kind: str, args: argparse.Namespace) -> None:
    """Tune, measure and write one part."""
    print(f"{kind}: hasten tune", flush=True)
    tune_report = run_tune(kind, args.small, args.budget)
    print(
        f"{kind}: tune chose {tune_report['best'] or 'the unchanged script'}",
        flush=True,
    )
    device = torch.device(
        "cuda" if torch.cuda.is_available() and not args.small else "cpu"
    )
    bench = Bench(kind, args.small, device, tune_report["best"])
    steps, losses, left_out = prepare_contenders(bench, args.only)
    times = take_turns(bench, steps)
    seconds = {name: statistics.median(row) for name, row in times.items()}
    rows = {
        name: {
            "seconds": seconds[name],
            "faster": seconds[REFERENCE] / seconds[name],
            "losses_apart": largest_difference(losses[name], losses[REFERENCE]),
            "last_loss": losses[name][-1],
        }
        for name in steps
    }
    platform_versions = installed_versions(device.type)
    content = {
        "rows": rows,
        "left_out": left_out,
        "tune": tune_report,
        "losses": losses,
    }
    text = format_page(bench, tune_report, rows, left_out, platform_versions)
    record_run(
        "tuned", f"{kind}, {device.type}", content, text, platform_versions, args.out
    )
    print(text)


def format_page(
    bench: Bench,
    tune_report: dict[str, Any],
    rows: dict[str, Any],
    left_out: dict[str, str],
    platform_versions: Any,
) -> str:
    """The results in words and tables."""
    tokens = 16 * 1024 if bench.kind == "gpt2" and not bench.small else 0
    title = (
        "GPT-2-small-sized, 16 x 1024 tokens, bf16"
        if tokens
        else f"{bench.kind}{', small' if bench.small else ''}"
    )
    tuned_values = (
        ", ".join(f"{name}={value}" for name, value in tune_report["best"].items())
        or "the unchanged script"
    )
    lines = [
        f"# Tuned: {title}",
        "",
        ", ".join(f"{key} {value}" for key, value in platform_versions.items()),
        "",
        f"`hasten tune` chose: **{tuned_values}** in {tune_report.get('seconds', 0):.0f} s ({tune_report.get('gain', 0):.2f} times as fast as the "
        f"unchanged script, by its own measurement){'. It failed: ' + tune_report['error'] if 'error' in tune_report else ''}.",
        "",
        f"Median of interleaved turns, by the clock; times as fast as the eager loop by hand; the largest relative difference of the "
        f"first {COMPARED} losses from that loop's.",
        "",
        f"| | step |{' ktok/s |' if tokens else ''} times as fast | losses apart | loss {COMPARED} |",
        f"|---|---|{'---|' if tokens else ''}---|---|---|",
    ]
    for name, row in rows.items():
        speed = f" {tokens / row['seconds'] / 1e3:.0f} |" if tokens else ""
        step = (
            f"{row['seconds'] * 1e3:.2f} ms"
            if row["seconds"] > 0.01
            else f"{row['seconds'] * 1e6:.0f} µs"
        )
        lines.append(
            f"| {name} | {step} |{speed} {row['faster']:.2f} | {row['losses_apart']:.2e} | {row['last_loss']:.4f} |"
        )
    lines += ["", *(f"Left out: {name} ({why})." for name, why in left_out.items())]
    lines += [
        "",
        "## Trials of tune",
        "",
        "| values | step | verdict |",
        "|---|---|---|",
    ]
    for trial in tune_report["trials"]:
        values = (
            ", ".join(f"{name}={value}" for name, value in trial["values"].items())
            or "the unchanged script"
        )
        lines.append(
            f"| {values} | {trial['step_s'] * 1e3:.3f} ms | {trial['verdict']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the parts that were asked for."""
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--part", choices=["gpt2", "tiny", "all"], default="all")
    parser.add_argument("--small", action="store_true", help="small sizes on the CPU")
    parser.add_argument(
        "--budget", default="240s", help="of hasten tune, for each part"
    )
    parser.add_argument(
        "--only",
        nargs="*",
        default=[],
        help="words in the names of contenders to run, beside the eager loop",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    # contenders share code; none may give up because of what others compiled
    torch._dynamo.config.recompile_limit = 64
    args.only = [*args.only, REFERENCE] if args.only else []
    for kind in ("tiny", "gpt2") if args.part == "all" else (args.part,):
        try:
            measure_part(kind, args)
        except Exception:  # of any kind: the other part runs all the same
            traceback.print_exc()


if __name__ == "__main__":
    main()
