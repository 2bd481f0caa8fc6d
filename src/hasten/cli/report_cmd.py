"""`hasten report`: a self-contained page or picture about one or several runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from hasten.cli.flags import CommandParser
from hasten.errors import ConfigError
from hasten.tools.report.report_live import follow
from hasten.tools.report.report_page import page
from hasten.tools.report.report_picture import picture
from hasten.tracking.run_folder import RunFolder, read_run

EVERY_S: Final = 2.0


def main(argv: Sequence[str]) -> int:
    """Run `hasten report …`."""
    parser = CommandParser(
        prog="hasten report",
        description="Write an HTML report of a training run: curves, throughput, step times by phase and rank, memory, events, "
        "settings and environment. Several runs are overlaid, with a table of differences.",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN_DIR", help="project_dir (or output_dir of a Trainer) of a training"
    )
    parser.add_argument(
        *("-o", "--output"),
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="FILE.html for the page (default: report.html), FILE.png for a picture of its charts",
    )
    parser.add_argument(
        "--live",
        action="store_true",
        help="follow a run: update the report until Ctrl-C; the page reloads itself",
    )
    parser.add_argument(
        "--every", type=float, default=EVERY_S, metavar="SECONDS", help="seconds between updates of --live (default: 2)"
    )
    given = parser.parse_args(argv)
    if given.output.suffix not in (".html", ".png"):
        raise ConfigError(
            f"--output={given.output} ends neither in .html nor in .png, the two formats of a report; rename it."
        )
    if not 0 < given.every < float("inf"):
        raise ConfigError(f"--every={given.every} is not a number of seconds above 0; correct it.")
    if given.live:
        sys.stdout.write(f"{given.output}: following {', '.join(given.runs)}; press Ctrl-C to stop\n")
        sys.stdout.flush()
        count = follow(given.runs, given.every, lambda: write(given.runs, given.output, reload_s=given.every))
        if not count:
            return 0
    write(given.runs, given.output)
    sys.stdout.write(f"{given.output}\n")
    return 0


def write(folders: Sequence[str], output: Path, reload_s: float = 0.0) -> None:
    """Write the report atomically, so that no browser reads an incomplete file."""
    runs = named_apart([read_run(folder) for folder in folders], folders)
    content = picture(runs) if output.suffix == ".png" else page(runs, reload_s).encode()
    output.parent.mkdir(parents=True, exist_ok=True)
    draft = output.with_name(f".{output.name}.draft")
    draft.write_bytes(content)
    draft.replace(output)


def named_apart(runs: Sequence[RunFolder], folders: Sequence[str]) -> list[RunFolder]:
    """Return the runs, renamed to their whole path where two folders have the same name."""
    names = [run.name for run in runs]
    return [
        replace(run, name=folder) if names.count(run.name) > 1 else run
        for run, folder in zip(runs, folders, strict=True)
    ]
