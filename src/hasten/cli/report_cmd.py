"""`hasten report`: one self-contained page about a run, or about several laid over each other."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hasten.cli.report_page import page
from hasten.tracking.run_folder import RunFolder, read_run


def main(argv: Sequence[str]) -> int:
    """Run `hasten report …`."""
    parser = argparse.ArgumentParser(
        prog="hasten report",
        description="Write one HTML page about a training: curves, throughput, times of steps by part and rank, memory, "
        "events, settings and environment. Several runs are laid over each other, with a table of what differs.",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN_DIR", help="project_dir (or output_dir of a Trainer) of a training"
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html"
    )
    given = parser.parse_args(argv)
    runs = named_apart([read_run(folder) for folder in given.runs], given.runs)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(page(runs), encoding="utf-8")
    sys.stdout.write(f"{given.output}\n")
    return 0


def named_apart(runs: Sequence[RunFolder], folders: Sequence[str]) -> list[RunFolder]:
    """The runs, named by their whole path where two folders have the same name."""
    names = [run.name for run in runs]
    return [
        replace(run, name=folder) if names.count(run.name) > 1 else run
        for run, folder in zip(runs, folders, strict=True)
    ]
