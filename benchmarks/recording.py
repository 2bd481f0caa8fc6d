"""The results of benchmarks: one JSON file for each benchmark with all of its runs, and the page that is made from it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(os.environ.get("BENCHMARK_RESULTS") or Path(__file__).parent / "results")
"""The folder of the results; run_all.py names another one for short runs."""
STARTED = datetime.now(UTC).isoformat(timespec="seconds")
sys.path.append(str(Path(__file__).parents[1]))  # some benchmarks use `tests.support`


def measured_commit() -> str:
    """Return the commit that is measured, with a plus sign when the library was changed since; BENCHMARK_COMMIT where git is not."""
    if environment_commit := os.environ.get("BENCHMARK_COMMIT"):
        return environment_commit
    root = Path(__file__).parents[1]
    ask = ["git", "-C", str(root)]
    try:
        revision = subprocess.run(
            [*ask, "rev-parse", "--short=7", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        )
        changed = subprocess.run(
            [*ask, "status", "--porcelain", "src"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return revision.stdout.strip() + ("+" if changed.stdout.strip() else "")


def record_run(
    benchmark: str,
    setting: str,
    measurements: Any,  # Any: JSON
    page: str,
    versions: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> None:
    """Add this process's run to the benchmark's file, in place of an earlier state of the same run, and make the page."""
    target = (folder or RESULTS) / f"{benchmark}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    runs = read_runs(benchmark, folder) if target.exists() else []
    run_versions = dict(versions or {})
    run = {
        "setting": setting,
        "started": STARTED,
        "date": run_versions.pop("date", STARTED[:10]),
        "commit": measured_commit(),
        "hardware": run_versions.pop("hardware", f"CPU, {os.cpu_count()} cores"),
        "versions": run_versions,
        "found": without_rounds(measurements),
        "page": page.rstrip().splitlines(),
    }
    runs = [
        earlier_run
        for earlier_run in runs
        if (earlier_run["started"], earlier_run["setting"]) != (STARTED, setting)
    ] + [run]
    write_runs(benchmark, runs, folder)


def without_rounds(numbers: Any) -> Any:  # Any: JSON
    """Leave out lists of single rounds: medians and quartiles are what is kept."""
    if isinstance(numbers, dict):
        return {
            name: without_rounds(value)
            for name, value in numbers.items()
            if not is_rounds(value)
        }
    if isinstance(numbers, list):
        return [without_rounds(value) for value in numbers]
    return numbers


def is_rounds(value: Any) -> bool:  # Any: JSON
    """Return whether a value is a list of more than four numbers."""
    return (
        isinstance(value, list)
        and len(value) > 4
        and all(isinstance(number, int | float) for number in value)
    )


def read_runs(benchmark: str, folder: Path | None = None) -> list[dict[str, Any]]:
    """Return all runs of a benchmark, oldest first."""
    content = json.loads(
        ((folder or RESULTS) / f"{benchmark}.json").read_text(encoding="utf-8")
    )
    runs: list[dict[str, Any]] = content["runs"]
    return runs


# Any: JSON
def newest_measurements(
    benchmark: str, setting: str, folder: Path | None = None
) -> Any:
    """Return the numbers of the newest run under a setting."""
    return [run for run in read_runs(benchmark, folder) if run["setting"] == setting][
        -1
    ]["found"]


def write_runs(
    benchmark: str, runs: list[dict[str, Any]], folder: Path | None = None
) -> None:
    """Write the runs and the page made from them."""
    target = (folder or RESULTS) / f"{benchmark}.json"
    text = json.dumps({"benchmark": benchmark, "runs": runs}, indent=1)
    target.write_text(_short_lists(text) + "\n", encoding="utf-8")
    target.with_suffix(".md").write_text(page_of(benchmark, runs), encoding="utf-8")


def page_of(benchmark: str, runs: list[dict[str, Any]]) -> str:
    """Return the page with every run's table, the newest run first."""
    script = Path(__file__).parent / f"{benchmark}.py"
    made_by = f"`benchmarks/{script.name}`" if script.exists() else "hand"
    lines = [
        f"# {benchmark}",
        "",
        f"Every run that was kept, the newest first. Made by {made_by}; the numbers are in `{benchmark}.json`.",
    ]
    for run in reversed(runs):
        where = f"{run['setting']}, {run['date']}, {run['hardware']}, commit {run['commit']}"
        lines += ["", f"## {where}", ""]
        lines += [_as_text(line) for line in run["page"]]
    return "\n".join(lines) + "\n"


def _as_text(line: str) -> str:
    """Return a recorded line below the page's headings, without references such as `[0][4]`."""
    below_headings = re.sub(r"^(#+) ", r"##\1 ", line)
    return re.sub(r"\]( ?)\[", r"]\1\\[", below_headings)


def _short_lists(text: str) -> str:
    """Put lists of plain numbers on one line."""
    return re.sub(
        r"\[\n\s+(-?[\d.e+-]+(?:,\n\s+-?[\d.e+-]+)*)\n\s+\]",
        lambda m: "[" + re.sub(r",\n\s+", ", ", m[1]) + "]",
        text,
    )
