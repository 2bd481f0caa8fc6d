"""Every benchmark that runs on this machine, one after the other, and their numbers in one table.

    python benchmarks/run_all.py            # short runs on the CPU, about ten minutes on two quiet cores
    python benchmarks/run_all.py --full     # the settings the committed results were made with
    python benchmarks/run_all.py --cuda     # what the published tables are made from, on one H200 in ten minutes

A benchmark that fails is named with the end of what it printed, and the others run all the same; the exit status then is 1.
Each script also writes a page of its own beside the table of all, all.md: short runs to build/benchmarks, full ones to benchmarks/results.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from loading import installed_versions
from recording import RESULTS, read_runs

BENCHMARKS_FOLDER = Path(__file__).parent
SHORT = BENCHMARKS_FOLDER.parent / "build" / "benchmarks"
"""Pages of short runs, which do not replace the committed ones."""
TIMEOUT_S = 900


@dataclass(frozen=True)
class Plan:
    """One script: arguments of a short run, and those always given."""

    script: str
    short: tuple[str, ...] = ()
    always: tuple[str, ...] = ()


PLANS = (
    Plan("full_loop.py", ("--quick",)),
    Plan("input_bound.py", ("--quick",)),
    Plan("import_time.py", ("--quick",)),
    Plan("launch_overhead.py", ("--rounds", "3")),
    Plan("checkpoint.py", ("--rounds", "2"), ("--cpu",)),
    Plan(
        "cold_loading.py", ("--gigabytes", "0.2", "--rounds", "2"), ("--device", "cpu")
    ),
)
CUDA_PLANS = (
    Plan(
        "full_loop.py",
        always=("--device", "cuda", "--workers", "0", "--rounds", "2", "--published"),
    ),
    Plan("offload.py", always=("--parts", "cpu", "--depth", "16")),
    Plan("cold_loading.py", always=("--device", "cuda", "--rounds", "1")),
    Plan(
        "checkpoint.py",
        always=(
            "--rounds",
            "2",
            "--peer-rounds",
            "1",
            "--blocking",
            "--only",
            "hasten",
            "torch synced",
            "accelerate synced",
        ),
    ),
    Plan("sharding.py", always=("--rounds", "4", "--steps", "5")),
    Plan(
        "offload_training.py",
        always=("--rounds", "2", "--each", "4", "--only", "optimizer", "all", "FSDP2"),
    ),
    Plan(
        "language_models.py",
        always=(
            "--rounds",
            "2",
            "--only",
            "bare",
            "hasten, performance",
            "fp8, blocks",
        ),
    ),
)
"""Benchmarks of the published tables, the headline first; each as short as its numbers allow."""
NOT_HERE = {
    "plan_accuracy.py": "needs a GPU",
    "offload.py": "needs a GPU",
    "offload_training.py": "needs a GPU",
    "examples_on_a_gpu.py": "needs a GPU",
    "survive_kills.py": "needs torchft, root and an hour: make bench-survive",
    "headline.py": "draws a picture of other pages",
    "measuring.py": "shared by the others",
    "sharding.py": "needs a GPU",
    "language_models.py": "needs a GPU",
    "tuned.py": "needs a GPU",
    "tuned_script.py": "the script that tuned.py tunes",
    "engines.py": "needs a GPU",
    "dropin_clients.py": "needs the original package beside the drop-in",
    "either_package.py": "shared by the others",
    "loading.py": "shared by the others",
    "recording.py": "shared by the others",
    "published.py": "makes the tables of the pages",
    "run_all.py": "this script",
}


def list_rows(page: list[str]) -> list[tuple[str, str]]:
    """(what, numbers) for every row of every table of a page."""
    rows: list[tuple[str, str]] = []
    header: list[str] = []
    for line in page:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells
        elif set(line) - set("|-: "):
            values = zip(header[1:], cells[1:], strict=False)
            rows.append(
                (
                    cells[0],
                    "; ".join(
                        f"{name}: {value}" if name else value for name, value in values
                    ),
                )
            )
    return rows


def unknown_scripts() -> list[str]:
    """Scripts that are neither run nor left out for a reason."""
    return sorted(
        {path.name for path in BENCHMARKS_FOLDER.glob("*.py")}
        - {plan.script for plan in PLANS}
        - set(NOT_HERE)
    )


def run_script(plan: Plan, full: bool, results: Path) -> tuple[float, str | None]:
    """Seconds it took, and the end of what it printed when it failed."""
    always = [word.format(results=results) for word in plan.always]
    command = [
        sys.executable,
        str(BENCHMARKS_FOLDER / plan.script),
        *always,
        *(() if full else plan.short),
    ]
    start_time = time.perf_counter()
    try:
        env = {**os.environ, "BENCHMARK_RESULTS": str(results)}
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env=env,
        )
        failed = (
            None
            if done.returncode == 0
            else (done.stderr or done.stdout).strip().splitlines()[-1:]
        )
    except subprocess.TimeoutExpired:
        failed = [f"took longer than {TIMEOUT_S} s"]
    return time.perf_counter() - start_time, None if failed is None else (
        failed or ["no output"]
    )[0][:200]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--full", action="store_true", help="the settings of the committed results"
    )
    parser.add_argument(
        "--cuda",
        action="store_true",
        help="the benchmarks of the published tables, on one GPU",
    )
    parser.add_argument("--only", nargs="*", default=[], help="only these scripts")
    args = parser.parse_args()
    assert not unknown_scripts(), (
        f"say in run_all.py how to run {unknown_scripts()}, or why not"
    )
    full, plans = args.full or args.cuda, CUDA_PLANS if args.cuda else PLANS
    results = (RESULTS if full else SHORT).resolve()
    results.mkdir(parents=True, exist_ok=True)
    lines = [
        "# All benchmarks",
        "",
        ", ".join(f"{key} {value}" for key, value in installed_versions().items()),
        "",
    ]
    lines += [
        f"{'Full' if full else 'Short'} runs.",
        "",
        "| benchmark | what | numbers |",
        "|---|---|---|",
    ]
    failures, start_time = 0, time.perf_counter()
    for plan in plans:
        if args.only and plan.script not in args.only:
            continue
        seconds, failed = run_script(plan, full, results)
        print(
            f"{plan.script}: {f'failed: {failed}' if failed else 'done'} ({seconds:.0f} s)",
            flush=True,
        )
        if failed:
            failures += 1
            lines.append(f"| {plan.script} | failed | {failed.replace('|', '/')} |")
            continue
        page = read_runs(Path(plan.script).stem, results)[-1]["page"]
        lines += [
            f"| {plan.script} | {title} | {numbers} |"
            for title, numbers in list_rows(page)
        ]
    lines += [
        f"| {name} | not run | {why} |"
        for name, why in NOT_HERE.items()
        if why.startswith("needs")
    ]
    table = (SHORT if args.cuda else results) / "all.md"
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text("\n".join(lines) + "\n")
    print(f"written: {table} ({time.perf_counter() - start_time:.0f} s)")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
