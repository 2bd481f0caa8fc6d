"""`hasten report`: a self-contained page about one or several runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hasten.cli.flags import CommandParser
from hasten.errors import ConfigError
from hasten.extensions.report.report_page import report_page
from hasten.extensions.report.run_folder import RunFolder, read_run


def main(argv: Sequence[str]) -> int:
    """Run `hasten report …`."""
    parser = CommandParser(
        prog="hasten report",
        description="Write an HTML report of a training run: curves, throughput, step times by phase and rank, memory, events, "
        "settings and environment. Several runs are overlaid, with a table of differences.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN_DIR",
        help="project_dir (or output_dir of a Trainer) of a training",
    )
    parser.add_argument(
        *("-o", "--output"),
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="the page (default: report.html)",
    )
    command_arguments = parser.parse_args(argv)
    if command_arguments.output.suffix != ".html":
        raise ConfigError(
            f"--output={command_arguments.output} does not end in .html, but a report is a page of HTML; rename it."
        )
    write_report(command_arguments.runs, command_arguments.output)
    sys.stdout.write(f"{command_arguments.output}\n")
    return 0


def write_report(folders: Sequence[str], output: Path) -> None:
    """Write the report atomically, so that no browser reads an incomplete file."""
    runs = give_distinct_names(list(map(read_run, folders)), folders)
    output.parent.mkdir(parents=True, exist_ok=True)
    draft_path = output.with_name(f".{output.name}.draft")
    draft_path.write_text(report_page(runs), encoding="utf-8")
    draft_path.replace(output)


def give_distinct_names(
    runs: Sequence[RunFolder], folders: Sequence[str]
) -> list[RunFolder]:
    """Return the runs, renamed to their whole path where two folders have the same name."""
    names = [run.name for run in runs]
    distinct_runs = []
    for run, folder in zip(runs, folders, strict=True):
        is_unique = names.count(run.name) == 1
        distinct_runs.append(run if is_unique else replace(run, name=folder))
    return distinct_runs
