"""`hasten tune`: short real runs of a script under candidate settings, a table of results, and the best settings."""

from __future__ import annotations

import argparse
import json
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

from hasten.cli.flags import CommandParser, split_at_dashes, whole_number
from hasten.config import files
from hasten.config.root import Config
from hasten.errors import ConfigError
from hasten.extensions.planning.tune import tuning
from hasten.extensions.planning.tune.tuning import (
    SettingValues,
    Trial,
    TrialOutcome,
    TunedMachine,
    Tuning,
    describe_exit,
)
from hasten.launch.base import describe_host
from hasten.runtime import env
from hasten.runtime.bytes_plan import format_bytes

_TRIAL_HELP: Final = """Every trial runs the script from its start, with the same data, and stops it after a few updates. A value is accepted
if steps are more than 2 % faster and the losses of the first updates equal those of the unchanged script within 0.1 % (1 % for a script in half
precision, 3 % where the precision changes). Trials are not logged or saved.
"""
_LEAST_FOR_COMPILING: Final = 300.0
"""Seconds of budget below which compiling on a CPU is not tried, as it would take most of them."""


def main(argv: Sequence[str]) -> int:
    """Run `hasten tune …`; return 0 if the script ran."""
    command_words, script_words = split_at_dashes(argv)
    arguments, unknown_words = _make_parser().parse_known_args(command_words)
    script_path = Path(arguments.script)
    if not script_path.is_file():
        raise ConfigError(
            f"the script {arguments.script!r} does not exist; the current folder is {Path.cwd()}."
        )
    budget_s = tuning.parse_duration(arguments.budget)
    tuning.check_names(arguments.only)
    host = describe_host()
    on_cuda = host.device == "cuda" and not arguments.cpu
    tuned_machine = TunedMachine(
        cuda=on_cuda,
        cores=host.cores,
        has_compiler=bool(shutil.which("g++")) and budget_s >= _LEAST_FOR_COMPILING,
    )
    deadline = time.monotonic() + budget_s
    trial_runner = TrialRunner(
        [str(script_path), *unknown_words, *script_words], arguments, deadline
    )
    baseline = trial_runner.run_trial({})
    tuning_run = Tuning(
        tuning.select_knobs(tuning.list_knobs(tuned_machine, baseline), arguments.only)
    )
    # for one more trial, and for the second run of the unchanged script, which confirms the speedup
    reserved_s = 2 * trial_runner.unchanged_s
    tuning_run.try_knobs(
        baseline,
        trial_runner.run_trial,
        lambda: time.monotonic() + reserved_s < deadline,
    )
    _report_results(tuning_run, arguments)
    return 0


class TrialRunner:
    """Runner of trials, one after the other, each in a separate process."""

    def __init__(
        self, script_command: list[str], arguments: argparse.Namespace, deadline: float
    ) -> None:
        self._script_command = script_command
        self._arguments = arguments
        self._deadline = deadline
        self.unchanged_s = 0.0
        """Seconds of the first run of the unchanged script."""

    def run_trial(self, setting_values: SettingValues) -> TrialOutcome:
        """Run one trial and return its measurements."""
        sys.stderr.write(
            f"[hasten] {max(0, self._deadline - time.monotonic()):.0f} s left, trying {_format_values(setting_values)}\n"
        )
        with tempfile.TemporaryDirectory(prefix="hasten_tune_") as folder:
            result_file = Path(folder) / "result.json"
            trial_spec = {
                "values": dict(setting_values),
                "result": str(result_file),
                "warmup": self._arguments.warmup,
                "updates": self._arguments.updates,
            }
            spec_file = Path(folder) / "spec.json"
            spec_file.write_bytes(msgspec.json.encode(trial_spec))
            command = [
                *(sys.executable, "-m", "hasten.extensions.planning.tune.trial"),
                str(spec_file),
                *self._script_command,
            ]
            variables = dict(env.snapshot())
            if self._arguments.cpu:
                variables["HASTEN_CPU"] = "1"
            start_s = time.monotonic()
            timeout_s = max(
                30.0,
                self._deadline - start_s,
                0.0 if setting_values else 2 * self.unchanged_s,
            )
            try:
                finished_process = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    timeout=timeout_s,
                    env=variables,
                )
            except subprocess.TimeoutExpired:
                return TrialOutcome(error="not done within the budget")
            duration_s = time.monotonic() - start_s
            self.unchanged_s = self.unchanged_s or duration_s
            if not result_file.is_file():
                return TrialOutcome(
                    error=describe_exit(
                        finished_process.stderr, finished_process.returncode
                    )
                )
            return msgspec.json.decode(result_file.read_bytes(), type=TrialOutcome)


def _report_results(tuning_run: Tuning, arguments: argparse.Namespace) -> None:
    best_trial = tuning_run.best
    assert best_trial is not None, "the baseline ran"
    config = tuning.config_of(best_trial.values)
    script_changes = tuning.list_script_changes(best_trial.values, tuning_run.knobs)
    if arguments.output:
        files.write(config, arguments.output)
    if arguments.json:
        trials = []
        for trial in tuning_run.trials:
            trials.append(
                {
                    "values": dict(trial.values),
                    "verdict": trial.verdict,
                    **asdict(trial.outcome),
                }
            )
        json_report = {
            "trials": trials,
            "best": dict(best_trial.values),
            "gain": tuning_run.gain,
            "not_tried": tuning_run.not_tried,
            "advice": script_changes,
        }
        sys.stdout.write(json.dumps(json_report, indent=2) + "\n")
        return
    console = Console()
    console.print(make_table(tuning_run.trials))
    for line in describe_result(
        tuning_run,
        script_changes,
        arguments.output,
        changes_settings=config != Config(),
    ):
        console.print(line, highlight=False, soft_wrap=True)


def describe_result(
    tuning_run: Tuning,
    script_changes: Sequence[str],
    output_path: str | None,
    changes_settings: bool,
) -> list[str]:
    """Return the conclusion of the table, in sentences."""
    best_trial = tuning_run.best
    assert best_trial is not None, "the baseline ran"
    lines = ["best: the unchanged script; no candidate is faster at equal losses"]
    if len(tuning_run.trials) == 1:
        lines = ["only the unchanged script was measured"]
    if best_trial.values:
        lines = [
            f"best: {_format_values(best_trial.values)}, {tuning_run.gain:.2f} times as fast as the unchanged script"
        ]
    if tuning_run.not_tried:
        untried_values = "; ".join(map(_format_values, tuning_run.not_tried))
        lines.append(
            f"not tried, because the budget was used up: {untried_values}; increase --budget, or select candidates with --only"
        )
    lines += [f"  in the script: {line}" for line in script_changes]
    if output_path:
        remark = "" if changes_settings else ", which changes no setting"
        lines.append(f"written: {output_path}{remark}")
    return lines


def _format_values(setting_values: SettingValues) -> str:
    shown_settings = [
        f"{name}={setting_value}" for name, setting_value in setting_values.items()
    ]
    return ", ".join(shown_settings) or "the unchanged script"


def make_table(trials: Sequence[Trial]) -> Table:
    """Return a table with one row per trial."""
    trial_table = Table(title="measured")
    trial_table.add_column("values")
    trial_table.add_column("step", justify="right")
    trial_table.add_column("memory", justify="right")
    trial_table.add_column("verdict")
    for trial in trials:
        outcome = trial.outcome
        trial_table.add_row(
            _format_values(trial.values),
            f"{outcome.step_s * 1e3:.2f} ms" if outcome.step_s else "",
            format_bytes(outcome.peak_bytes) if outcome.peak_bytes else "",
            trial.verdict,
        )
    return trial_table


def _make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hasten tune",
        usage="hasten tune script.py [arguments of the script] [--budget 10m] [options]",
        description="Find faster settings for a script on this machine by running its first updates.",
        epilog=_TRIAL_HELP,
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
        type=whole_number(2),
        default=20,
        help="updates that are timed in each trial",
    )
    parser.add_argument(
        "--warmup",
        type=whole_number(),
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
