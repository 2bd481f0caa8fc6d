"""`hasten tune`: short real runs of a script under candidate settings, a table of results, and the best settings."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from hasten.cli.flags import CommandParser, split_at_dashes, whole
from hasten.config import files
from hasten.config.root import Config
from hasten.errors import ConfigError
from hasten.extensions.planning.tune import tuning
from hasten.extensions.planning.tune.tuning import (
    Trial,
    TrialOutcome,
    TunedMachine,
    Tuning,
    Values,
    in_output,
)
from hasten.launch.base import look_at_host
from hasten.runtime.bytes_plan import format_bytes

_ABOUT: Final = """Every trial runs the script from its start, with the same data, and stops it after a few updates. A value is accepted
if steps are more than 2 % faster and the losses of the first updates equal those of the unchanged script within 0.1 % (1 % for a script in half
precision, 3 % where the precision changes). Trials are not logged or saved.
"""
_LEAST_FOR_COMPILING: Final = 300.0
"""Seconds of budget below which compiling on a CPU is not tried, as it would take most of them."""


def main(argv: Sequence[str]) -> int:
    """Run `hasten tune …`; return 0 if the script ran."""
    words, own = split_at_dashes(argv)
    given, unknown = _parser().parse_known_args(words)
    script = Path(given.script)
    if not script.is_file():
        raise ConfigError(
            f"the script {given.script!r} does not exist; the current folder is {Path.cwd()}."
        )
    budget = tuning.seconds(given.budget)
    tuning.check_names(given.only)
    host = look_at_host()
    on_cuda = host.device == "cuda" and not given.cpu
    machine = TunedMachine(
        cuda=on_cuda,
        cores=host.cores,
        has_compiler=bool(shutil.which("g++")) and budget >= _LEAST_FOR_COMPILING,
    )
    deadline = time.monotonic() + budget
    runner = Runner([str(script), *unknown, *own], given, deadline)
    baseline = runner.measure({})
    course = Tuning(tuning.chosen(tuning.knobs(machine, baseline), given.only))
    # for one more trial, and for the second run of the unchanged script, which confirms the speedup
    reserved_s = 2 * runner.unchanged_s
    course.run(
        baseline, runner.measure, lambda: time.monotonic() + reserved_s < deadline
    )
    _finish(course, given)
    return 0


class Runner:
    """Runner of trials, one after the other, each in a separate process."""

    def __init__(
        self, script: list[str], given: argparse.Namespace, deadline: float
    ) -> None:
        self._script = script
        self._given = given
        self._deadline = deadline
        self.unchanged_s = 0.0
        """Seconds of the first run of the unchanged script."""

    def measure(self, values: Values) -> TrialOutcome:
        """Run one trial and return its measurements."""
        sys.stderr.write(
            f"[hasten] {max(0, self._deadline - time.monotonic()):.0f} s left, trying {_words(values)}\n"
        )
        with tempfile.TemporaryDirectory(prefix="hasten_tune_") as folder:
            result = Path(folder) / "result.json"
            spec = {
                "values": dict(values),
                "result": str(result),
                "warmup": self._given.warmup,
                "updates": self._given.updates,
            }
            spec_file = Path(folder) / "spec.json"
            spec_file.write_bytes(msgspec.json.encode(spec))
            command = [
                *(sys.executable, "-m", "hasten.extensions.planning.tune.trial"),
                str(spec_file),
                *self._script,
            ]
            variables = {
                **os.environ,
                **({"HASTEN_CPU": "1"} if self._given.cpu else {}),
            }
            start = time.monotonic()
            left = max(
                30.0, self._deadline - start, 0.0 if values else 2 * self.unchanged_s
            )
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=left, env=variables
                )
            except subprocess.TimeoutExpired:
                return TrialOutcome(error="not done within the budget")
            took = time.monotonic() - start
            self.unchanged_s = self.unchanged_s or took
            if not result.is_file():
                return TrialOutcome(error=in_output(done.stderr, done.returncode))
            return msgspec.json.decode(result.read_bytes(), type=TrialOutcome)


def _finish(course: Tuning, given: argparse.Namespace) -> None:
    best = course.best
    assert best is not None, "the baseline ran"
    config = tuning.config_of(best.values)
    lines = tuning.advice(best.values, course.knobs)
    if given.output:
        files.write(config, given.output)
    if given.json:
        trials = [
            {"values": dict(t.values), "verdict": t.verdict, **asdict(t.outcome)}
            for t in course.trials
        ]
        content = {
            "trials": trials,
            "best": dict(best.values),
            "gain": course.gain,
            "not_tried": course.not_tried,
            "advice": lines,
        }
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
        return
    console = Console()
    console.print(table(course.trials))
    for line in conclusion(course, lines, given.output, changed=config != Config()):
        console.print(line, highlight=False, soft_wrap=True)


def conclusion(
    course: Tuning, advice: Sequence[str], output: str | None, changed: bool
) -> list[str]:
    """Return the conclusion of the table, in sentences."""
    best = course.best
    assert best is not None, "the baseline ran"
    lines = ["best: the unchanged script; no candidate is faster at equal losses"]
    if len(course.trials) == 1:
        lines = ["only the unchanged script was measured"]
    if best.values:
        lines = [
            f"best: {_words(best.values)}, {course.gain:.2f} times as fast as the unchanged script"
        ]
    if course.not_tried:
        words = "; ".join(map(_words, course.not_tried))
        lines.append(
            f"not tried, because the budget was used up: {words}; increase --budget, or select candidates with --only"
        )
    lines += [f"  in the script: {line}" for line in advice]
    if output:
        lines.append(
            f"written: {output}"
            if changed
            else f"written: {output}, which changes no setting"
        )
    return lines


def _words(values: Values) -> str:
    settings = [f"{name}={value}" for name, value in values.items()]
    return ", ".join(settings) or "the unchanged script"


def table(trials: Sequence[Trial]) -> Table:
    """Return a table with one row per trial."""
    shown = Table(title="measured")
    for title in ("values", "step", "memory", "verdict"):
        shown.add_column(
            title, justify="left" if title in ("values", "verdict") else "right"
        )
    for trial in trials:
        out = trial.outcome
        shown.add_row(
            _words(trial.values),
            f"{out.step_s * 1e3:.2f} ms" if out.step_s else "",
            format_bytes(out.peak_bytes) if out.peak_bytes else "",
            trial.verdict,
        )
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hasten tune",
        usage="hasten tune script.py [arguments of the script] [--budget 10m] [options]",
        description="Find faster settings for a script on this machine by running its first updates.",
        epilog=_ABOUT,
        allow_abbrev=False,
    )
    parser.add_argument("script", help="a training script with an Accelerator")
    parser.add_argument(
        "--budget", default="10m", help="time for all trials: 90s, 10m, 1h"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="candidates to try, in this order: fused, compile, num_workers, …",
    )
    parser.add_argument(
        "--updates",
        type=whole(2),
        default=20,
        help="updates that are timed in each trial",
    )
    parser.add_argument(
        "--warmup",
        type=whole(),
        default=5,
        help="updates before those, which are not timed",
    )
    parser.add_argument(
        "--cpu", action="store_true", help="run on the CPU even if there is a GPU"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "-o",
        "--output",
        metavar="config.yaml",
        help="write the best settings to a file",
    )
    return parser
