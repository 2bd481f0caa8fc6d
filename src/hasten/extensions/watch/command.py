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
    arguments = parser.parse_args(argv)
    socket_folder = env.runtime_folder(env.snapshot())
    socket_paths = job_sockets(socket_folder, arguments.job)
    if arguments.json:
        sys.stdout.write(
            json.dumps(request_answers(socket_paths, arguments.stacks), indent=2) + "\n"
        )
        return 0
    console = Console(highlight=False)
    _redraw_table(console, socket_folder, socket_paths, arguments)
    return 0


def job_sockets(socket_folder: Path, job: int | None) -> list[Path]:
    """Return the sockets of the job.

    Raises: ConfigError if there is no such job, no job at all, or several and none is specified.
    """
    live_addresses = list(live_sockets(socket_folder)) if socket_folder.is_dir() else []
    jobs = sorted({address.job for address, _ in live_addresses})
    if not jobs:
        raise ConfigError(
            "no running job of this user was found on this machine; only jobs that `hasten launch` started are shown. Start the job with it."
        )
    if job is None and len(jobs) > 1:
        raise ConfigError(
            f"several jobs are running; give the number of one of them: {', '.join(map(str, jobs))}."
        )
    job_number = jobs[0] if job is None else job
    if job_number not in jobs:
        raise ConfigError(
            f"there is no job {job_number} on this machine; the running jobs are {', '.join(map(str, jobs))}."
        )
    return _of_job(socket_folder, job_number)


def _of_job(socket_folder: Path, job: int) -> list[Path]:
    """Return the sockets of a job: of several Accelerators in a process, the newest one's."""
    newest = {}
    for address, socket_path in sorted(live_sockets(socket_folder)):
        if address.job == job:
            newest[(address.rank, address.pid)] = socket_path
    return list(newest.values())


def request_answers(socket_paths: Sequence[Path], stacks: bool) -> list[Status]:
    rank_answers = [
        request_status(socket_path, {"stacks": stacks}) for socket_path in socket_paths
    ]
    return sorted(
        (answer for answer in rank_answers if answer is not None),
        key=lambda rank_status: (rank_status["rank"], rank_status["pid"]),
    )


def _redraw_table(
    console: Console,
    socket_folder: Path,
    socket_paths: Sequence[Path],
    arguments: argparse.Namespace,
) -> None:
    """Redraw the table until the job ends or the user presses Ctrl-C."""
    waits_by_pid: dict[int, list[bool]] = {}
    # waiting and working are distinguished by the CPU time between two samples
    request_answers(socket_paths, False)
    time.sleep(min(arguments.interval, 0.1))
    address = Address.parse_name(socket_paths[0].name)
    job = 0 if address is None else address.job
    with Live(console=console, auto_refresh=False) as live:
        try:
            while rank_answers := request_answers(socket_paths, arguments.stacks):
                for rank_status in rank_answers:
                    waits_by_pid.setdefault(rank_status["pid"], []).append(
                        rank_status["waits"]
                    )
                    del waits_by_pid[rank_status["pid"]][:-30]
                live.update(_render_page(rank_answers, waits_by_pid), refresh=True)
                time.sleep(max(arguments.interval, 0.1))
                # lost replicas, and restarted ranks, return as other processes
                socket_paths = _of_job(socket_folder, job)
        except KeyboardInterrupt:  # the way to leave a live table
            return
    console.print(f"job {job} has ended")


def _render_page(
    rank_answers: Sequence[Status], waits_by_pid: dict[int, list[bool]]
) -> RenderableType:
    if not rank_answers:
        return Text("no rank responded: the job has ended, or is stopped")
    first_status = rank_answers[0]
    # some may have been started again
    longest_s = max(float(rank_status["seconds"]) for rank_status in rank_answers)
    head = f"{first_status['script']} on {first_status['host']}: {len(rank_answers)} of {first_status['world_size']} ranks, for {_describe_duration(longest_s)}"
    rank_table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title=head, title_justify="left"
    )
    added_columns = dict.fromkeys(
        name for rank_status in rank_answers for name in rank_status["values"]
    )
    headings = (
        "rank",
        "pid",
        "step",
        "steps/s",
        *added_columns,
        "waiting",
        *first_status["memory"],
        "at",
    )
    for heading in headings:
        rank_table.add_column(
            heading,
            justify="left" if heading == "at" else "right",
            no_wrap=heading != "at",
        )
    for rank_status in rank_answers:
        rank_waits = waits_by_pid.get(rank_status["pid"]) or [rank_status["waits"]]
        steps_per_s = rank_status["steps_per_s"]
        rank_table.add_row(
            str(rank_status["rank"]),
            str(rank_status["pid"]),
            str(rank_status["step"]),
            "" if steps_per_s is None else f"{steps_per_s:.2f}",
            *(
                _FORMATS.get(name, "{}").format(rank_status["values"].get(name, ""))
                for name in added_columns
            ),
            f"{sum(rank_waits) / len(rank_waits):.0%}",
            *map(_describe_bytes, rank_status["memory"].values()),
            rank_status["at"],
        )
    renderables: list[RenderableType] = [rank_table]
    for rank_status in rank_answers:
        if "stack" in rank_status:
            renderables.append(
                Text(f"stack of rank {rank_status['rank']}", style="bold")
            )
            renderables += [
                Text(f"  {line_number}") for line_number in rank_status["stack"]
            ]
    return Group(*renderables)


def _describe_bytes(num_bytes: int) -> str:
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.0f} MiB"


def _describe_duration(seconds: float) -> str:
    minutes, remaining_s = divmod(int(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    if minutes:
        return f"{minutes} min {remaining_s} s"
    return f"{remaining_s} s"
