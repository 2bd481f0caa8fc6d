"""`hasten top`: a live table of a job on this machine, or with `--from` of a job on any machines, in another terminal."""

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

from hasten.cli.flags import CommandParser, seconds
from hasten.errors import ConfigError
from hasten.metrics.scrape import credentials, targets_of
from hasten.metrics.server import read_token
from hasten.runtime import env
from hasten.tools import cluster_top
from hasten.trust.stall.job_sockets import Address, ask, listening

_LOOKS: Final = 10
"""Number of samples that `--once` takes of the ranks."""
_RATES: Final = MappingProxyType({"tokens_per_second": ("tok/s", "{:,.0f}"), "mfu": ("mfu", "{:.1%}")})
"""Columns for ranks whose throughput is tracked."""
Status = dict[str, Any]  # Any: JSON values in a rank's answer


def main(argv: Sequence[str]) -> int:
    """Run `hasten top …`."""
    parser = CommandParser(
        prog="hasten top",
        description="Show the ranks of a job on this machine: step, rate, share of the time spent waiting for other ranks, "
        "memory, current line of code, and the last lines of its log. Only jobs of the same user are shown. Ranks respond from a "
        "background thread; jobs with trust.stall=off, and single processes that were not started by `hasten launch`, are not shown. "
        "With --from, the ranks of a job on any machines are shown, from the metrics that they serve (metrics.port).",
    )
    parser.add_argument(
        "job",
        nargs="?",
        type=int,
        metavar="JOB",
        help="number of the job; without it, jobs are listed if there are several",
    )
    parser.add_argument("--once", action="store_true", help="print one table and exit")
    parser.add_argument("--json", action="store_true", help="print the state of the ranks as JSON, once")
    parser.add_argument("--stacks", action="store_true", help="show the call stack of each rank")
    parser.add_argument(
        "--interval", type=seconds, default=1.0, metavar="S", help="seconds between refreshes (default: 1)"
    )
    _add_cluster_flags(parser)
    given = parser.parse_args(argv)
    if given.targets is not None:
        return _cluster(given)
    folder = env.runtime_folder(env.snapshot())
    sockets = chosen(folder, given.job)
    if sockets is None:
        list_jobs(folder)
        return 0
    if given.json:
        sys.stdout.write(json.dumps(_look(sockets, given.stacks), indent=2) + "\n")
        return 0
    console = Console(highlight=False)
    if given.once:
        console.print(_page(*_sampled(sockets, min(given.interval, 1.0), given.stacks)))
        return 0
    _follow(console, folder, sockets, given)
    return 0


def _add_cluster_flags(parser: CommandParser) -> None:
    group = parser.add_argument_group("a job on several machines")
    group.add_argument(
        "--from",
        dest="targets",
        metavar="TARGETS",
        help="addresses of the ranks' metrics, host:port,host:port or host:9400-9407, or a JSON file of Prometheus's file_sd_configs",
    )
    group.add_argument("--token_file", metavar="FILE", help="file with the bearer token of the metrics servers")
    group.add_argument("--ca", metavar="PEM", help="certificates that verify the servers; requests use TLS")
    group.add_argument("--cert", metavar="PEM", help="certificate of this client, for servers that require one")
    group.add_argument("--key", metavar="PEM", help="key of --cert")


def _cluster(given: argparse.Namespace) -> int:
    """Show the ranks behind `--from`; returns 1 if none has answered."""
    if given.job is not None or given.stacks:
        raise ConfigError(
            "JOB and --stacks belong to jobs on this machine, and metrics have neither job numbers nor stacks; leave them out, or leave out --from."
        )
    targets = targets_of(given.targets)
    token = None if given.token_file is None else read_token(given.token_file, "--token_file")
    proof = credentials(token, given.ca, given.cert, given.key)
    console = Console(highlight=False)
    if not (given.json or given.once):
        cluster_top.follow(console, targets, proof, given.interval)
        return 0
    rows, silent = cluster_top.once(targets, proof, min(given.interval, 1.0))
    if given.json:
        sys.stdout.write(json.dumps(cluster_top.as_json(rows, silent), indent=2) + "\n")
    else:
        console.print(cluster_top.page(console, rows, silent))
    return 0 if rows else 1


def chosen(folder: Path, job: int | None) -> list[Path] | None:
    """Return the sockets of the job; None if several jobs run and none is specified.

    Raises: ConfigError if there is no such job, or no job at all.
    """
    found = list(listening(folder)) if folder.is_dir() else []
    jobs = sorted({address.job for address, _ in found})
    if not jobs:
        raise ConfigError(
            "no running job of this user was found on this machine; jobs with trust.stall=off and plain `python script.py` processes are not "
            "shown. Start the job with `hasten launch`."
        )
    if job is None and len(jobs) > 1:
        return None
    wanted = jobs[0] if job is None else job
    if wanted not in jobs:
        raise ConfigError(
            f"there is no job {wanted} on this machine; the running jobs are {', '.join(map(str, jobs))}."
        )
    return _of_job(folder, wanted)


def _of_job(folder: Path, job: int) -> list[Path]:
    """Return the sockets of a job: of several Accelerators in a process, the newest one's."""
    newest = {(address.rank, address.pid): path for address, path in sorted(listening(folder)) if address.job == job}
    return list(newest.values())


def list_jobs(folder: Path) -> None:
    """Print the jobs of this machine."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("job", "script", "ranks here", "running"):
        grid.add_column(heading)
    for job in sorted({address.job for address, _ in listening(folder)}):
        answers = _look(chosen(folder, job) or [], False)
        if answers:
            grid.add_row(str(job), answers[0]["script"], str(len(answers)), _duration(answers[0]["seconds"]))
    console = Console(highlight=False)
    console.print(grid)
    console.print("several jobs are running: `hasten top JOB` shows one of them")


def _look(sockets: Sequence[Path], stacks: bool) -> list[Status]:
    answers = [ask(path, {"stacks": stacks}) for path in sockets]
    return sorted((answer for answer in answers if answer is not None), key=_place)


def _place(status: Status) -> tuple[int, str, int]:
    """Return the order of a rank in the table: by the replica, if the job has any, then by rank."""
    replica = str(status.get("replica", ""))
    return len(replica), replica, int(status["rank"])


def _sampled(sockets: Sequence[Path], seconds: float, stacks: bool) -> tuple[list[Status], dict[int, list[bool]]]:
    """Return the ranks' answers and, for each of ten samples, whether each rank waited, as in the live table."""
    waits: dict[int, list[bool]] = {}
    _look(sockets, False)  # waiting and working are distinguished by the CPU time between two samples
    for _ in range(_LOOKS):
        time.sleep(seconds / _LOOKS)
        answers = _look(sockets, stacks)
        for status in answers:
            waits.setdefault(status["pid"], []).append(status["waits"])
    return answers, waits


def _follow(console: Console, folder: Path, sockets: Sequence[Path], given: argparse.Namespace) -> None:
    """Redraw the table until the job ends or the user presses Ctrl-C."""
    waits: dict[int, list[bool]] = {}
    _look(sockets, False)  # waiting and working are distinguished by the CPU time between two samples
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
                sockets = _of_job(folder, job)  # lost replicas, and restarted ranks, return as other processes
        except KeyboardInterrupt:  # the way to leave a live table
            return
    console.print(f"job {job} has ended")


def _page(answers: Sequence[Status], waits: dict[int, list[bool]]) -> RenderableType:
    if not answers:
        return Text("no rank responded: the job has ended, or is stopped")
    first = answers[0]
    replicas = "replica" in first
    longest = max(answers, key=lambda status: float(status["seconds"]))  # of replicas, some may have been started again
    count = f"{len(answers)} ranks here" if replicas else f"{len(answers)} of {first['world_size']} ranks"
    head = f"{first['script']} on {first['host']}: {count}, for {_duration(longest['seconds'])}"
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=head, title_justify="left")
    rates = [name for name in _RATES if any(name in status for status in answers)]
    headings = (
        *(["replica"] if replicas else []),
        "rank",
        "pid",
        "step",
        "steps/s",
        *(_RATES[name][0] for name in rates),
        "waiting",
        *first["memory"],
        "at",
    )
    for heading in headings:
        grid.add_column(heading, justify="left" if heading == "at" else "right", no_wrap=heading != "at")
    for status in answers:
        seen = waits.get(status["pid"]) or [status["waits"]]
        rate = status["steps_per_s"]
        grid.add_row(
            *([str(status.get("replica", ""))] if replicas else []),
            str(status["rank"]),
            str(status["pid"]),
            str(status["step"]),
            "" if rate is None else f"{rate:.2f}",
            *(_RATES[name][1].format(status[name]) if name in status else "" for name in rates),
            f"{sum(seen) / len(seen):.0%}",
            *(_size(size) for size in status["memory"].values()),
            status["at"],
        )
    parts: list[RenderableType] = [grid]
    if replicas:
        parts.append(Text("; ".join(cluster_top.replica_words([status for status in answers if "replica" in status]))))
    for status in answers:
        where = f"rank {status['rank']}" + (f" of replica {status['replica']}" if "replica" in status else "")
        if status["log"]:
            parts.append(Text(f"log of {where}", style="bold"))
            parts += [Text(f"  {line}") for line in status["log"][-5:]]
        if "stack" in status:
            parts.append(Text(f"stack of {where}", style="bold"))
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
