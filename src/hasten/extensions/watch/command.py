"""`hasten top`: a live table of a job on this machine, in another terminal."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hasten.cli.flags import CommandParser, positive_seconds
from hasten.errors import ConfigError
from hasten.extensions.watch.job_sockets import Address, live_sockets, request_status
from hasten.runtime import env

_FORMATS: Final = MappingProxyType({"tokens_per_second": "{:,.0f}", "mfu": "{:.1%}"})
"""Formats of values that parts of the run add to the status; others are shown as they are."""
Status = dict[str, Any]  # Any: JSON values in a rank's answer


def main(argv: Sequence[str]) -> int:
    """Run `hasten top …`."""
    parser = CommandParser(
        prog="hasten top",
        description="Show the ranks of a job on this machine: step, rate, share of the time spent waiting for other ranks, "
        "memory and current line of code. Only jobs of the same user are shown. Ranks respond from a "
        "background thread; jobs that were not started by `hasten launch` are not shown.",
    )
    parser.add_argument(
        "job",
        nargs="?",
        type=int,
        metavar="JOB",
        help="number of the job, if there are several",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the state of the ranks as JSON, once"
    )
    parser.add_argument(
        "--stacks", action="store_true", help="show the call stack of each rank"
    )
    parser.add_argument(
        "--interval",
        type=positive_seconds,
        default=1.0,
        metavar="S",
        help="seconds between refreshes (default: 1)",
    )
    given = parser.parse_args(argv)
    folder = env.runtime_folder(env.snapshot())
    sockets = chosen(folder, given.job)
    if given.json:
        sys.stdout.write(json.dumps(_look(sockets, given.stacks), indent=2) + "\n")
        return 0
    console = Console(highlight=False)
    _follow(console, folder, sockets, given)
    return 0


def chosen(folder: Path, job: int | None) -> list[Path]:
    """Return the sockets of the job.

    Raises: ConfigError if there is no such job, no job at all, or several and none is specified.
    """
    found = list(live_sockets(folder)) if folder.is_dir() else []
    jobs = sorted({address.job for address, _ in found})
    if not jobs:
        raise ConfigError(
            "no running job of this user was found on this machine; only jobs that `hasten launch` started are shown. Start the job with it."
        )
    if job is None and len(jobs) > 1:
        raise ConfigError(
            f"several jobs are running; give the number of one of them: {', '.join(map(str, jobs))}."
        )
    wanted = jobs[0] if job is None else job
    if wanted not in jobs:
        raise ConfigError(
            f"there is no job {wanted} on this machine; the running jobs are {', '.join(map(str, jobs))}."
        )
    return _of_job(folder, wanted)


def _of_job(folder: Path, job: int) -> list[Path]:
    """Return the sockets of a job: of several Accelerators in a process, the newest one's."""
    newest = {
        (address.rank, address.pid): path
        for address, path in sorted(live_sockets(folder))
        if address.job == job
    }
    return list(newest.values())


def _look(sockets: Sequence[Path], stacks: bool) -> list[Status]:
    answers = [request_status(path, {"stacks": stacks}) for path in sockets]
    return sorted(
        (answer for answer in answers if answer is not None),
        key=lambda status: (status["rank"], status["pid"]),
    )


def _follow(
    console: Console, folder: Path, sockets: Sequence[Path], given: argparse.Namespace
) -> None:
    """Redraw the table until the job ends or the user presses Ctrl-C."""
    waits: dict[int, list[bool]] = {}
    # waiting and working are distinguished by the CPU time between two samples
    _look(sockets, False)
    time.sleep(min(given.interval, 0.1))
    address = Address.parse(sockets[0].name)
    job = 0 if address is None else address.job
    with Live(console=console, auto_refresh=False) as live:
        try:
            while answers := _look(sockets, given.stacks):
                for status in answers:
                    waits.setdefault(status["pid"], []).append(status["waits"])
                    del waits[status["pid"]][:-30]
                live.update(_page(answers, waits), refresh=True)
                time.sleep(max(given.interval, 0.1))
                # lost replicas, and restarted ranks, return as other processes
                sockets = _of_job(folder, job)
        except KeyboardInterrupt:  # the way to leave a live table
            return
    console.print(f"job {job} has ended")


def _page(answers: Sequence[Status], waits: dict[int, list[bool]]) -> RenderableType:
    if not answers:
        return Text("no rank responded: the job has ended, or is stopped")
    first = answers[0]
    # some may have been started again
    longest_s = max(float(status["seconds"]) for status in answers)
    head = f"{first['script']} on {first['host']}: {len(answers)} of {first['world_size']} ranks, for {_duration(longest_s)}"
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=head, title_justify="left")
    added = dict.fromkeys(name for status in answers for name in status["values"])
    headings = (
        "rank",
        "pid",
        "step",
        "steps/s",
        *added,
        "waiting",
        *first["memory"],
        "at",
    )
    for heading in headings:
        grid.add_column(
            heading,
            justify="left" if heading == "at" else "right",
            no_wrap=heading != "at",
        )
    for status in answers:
        seen = waits.get(status["pid"]) or [status["waits"]]
        rate = status["steps_per_s"]
        grid.add_row(
            str(status["rank"]),
            str(status["pid"]),
            str(status["step"]),
            "" if rate is None else f"{rate:.2f}",
            *(
                _FORMATS.get(name, "{}").format(status["values"].get(name, ""))
                for name in added
            ),
            f"{sum(seen) / len(seen):.0%}",
            *(_size(size) for size in status["memory"].values()),
            status["at"],
        )
    parts: list[RenderableType] = [grid]
    for status in answers:
        if "stack" in status:
            parts.append(Text(f"stack of rank {status['rank']}", style="bold"))
            parts += [Text(f"  {line}") for line in status["stack"]]
    return Group(*parts)


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return (
        f"{minutes // 60} h {minutes % 60} min"
        if minutes >= 60
        else f"{minutes} min {rest} s"
        if minutes
        else f"{rest} s"
    )
