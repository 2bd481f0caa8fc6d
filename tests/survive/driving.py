"""Start of a run of replicas through the launcher, and its disturbance at random instants."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

SURVIVE_TESTS: Final = Path(__file__).resolve().parent
DEFAULTS: Final = {
    "size": 240,
    "batch": 4,
    "epochs": 3,
    "sleep": 0.0,
    "every": 1,
    "workers": 0,
    "weighted": False,
    "preemptible": False,
    "open": False,
    "ranks": 1,
    "strategy": "auto",
    "clip": True,
    "faults": [],
    "replicas": 0,
}


@dataclass(slots=True)
class Disturbance:
    """What was done to the processes of a run."""

    kills: list[tuple[float, str]] = field(default_factory=list)
    stops: list[tuple[float, str, float]] = field(default_factory=list)


def options_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of the program under test."""
    return {**DEFAULTS, **options}


def search_path() -> str:
    """Return the module search path of this process for children that import tests."""
    return os.pathsep.join([str(SURVIVE_TESTS.parents[1]), *filter(None, sys.path)])


def start(
    folder: Path, replicas: int, options: Mapping[str, Any], *flags: str
) -> subprocess.Popen[str]:
    """Start the launcher with this many replicas."""
    command = [
        sys.executable,
        "-m",
        "hasten",
        "launch",
        "--cpu",
        "--replicas",
        str(replicas),
        *flags,
    ]
    if options["ranks"] > 1:
        command += [
            "--num_processes",
            str(replicas * options["ranks"]),
            "--strategy",
            options["strategy"],
        ]
    command += [
        str(SURVIVE_TESTS / "replica_program.py"),
        str(folder),
        json.dumps(options),
    ]
    env = {**os.environ, "PYTHONPATH": search_path()}
    with (folder / "out.txt").open("w") as out:
        return subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=env,
        )


def finish(run: subprocess.Popen[str], folder: Path, timeout_s: float) -> str:
    """Wait for a run to succeed; return its output."""
    try:
        code = run.wait(timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            run.wait(20)
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
        raise AssertionError(
            f"the run did not end in {timeout_s:.0f} s:\n{(folder / 'out.txt').read_text()[-6000:]}"
        ) from None
    text = (folder / "out.txt").read_text()
    assert code == 0, text[-6000:]
    return text


def live(folder: Path) -> dict[str, int]:
    """Return the process of each replica that has begun to train, by name, with those of all ranks as REPLICA.RANK."""
    pids_by_name: dict[str, int] = {}
    for path in sorted(
        folder.glob("replica-*.jsonl"), key=lambda log_path: log_path.stat().st_ctime
    ):
        name, pid = path.stem.split("-")[1:]
        with suppress(OSError):
            if (
                path.stat().st_size
                and "python" in Path(f"/proc/{pid}/cmdline").read_text()
            ):
                pids_by_name[name] = int(pid)
    return pids_by_name


def recent(folder: Path, seconds: float = 0.5) -> dict[str, int]:
    """Return the live replicas that have written within the last seconds."""
    current_time = time.time()
    paths = {
        (*path.stem.split("-")[1:],): path for path in folder.glob("replica-*.jsonl")
    }
    return {
        name: pid
        for name, pid in live(folder).items()
        if current_time - paths[(name, str(pid))].stat().st_mtime < seconds
    }


def wait_for(
    run: subprocess.Popen[str], folder: Path, number: int, timeout_s: float = 120.0
) -> dict[str, int]:
    """Wait until this many replicas train; return their processes."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until and run.poll() is None:
        live_replicas = recent(folder)
        if len(live_replicas) >= number:
            return live_replicas
        time.sleep(0.02)
    return {}


def close(folder: Path) -> int:
    """Let a run with the option `open` end after the epoch that follows the current one; return its number of epochs."""
    lines = [
        line
        for path in folder.glob("replica-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    epochs = 2 + int(
        max(json.loads(line)["epoch"] for line in lines if line.endswith("}"))
    )
    draft = folder / "last.draft"
    draft.write_text(str(epochs))
    draft.rename(folder / "last")
    return epochs


def disturb(
    run: subprocess.Popen[str],
    folder: Path,
    number: int,
    replicas: int,
    rng: random.Random,
) -> Disturbance:
    """Kill or stop this many processes at random instants, one after the other, each while all replicas train."""
    done = Disturbance()
    while len(done.kills) + len(done.stops) < number and run.poll() is None:
        live_replicas = wait_for(run, folder, replicas)
        if not live_replicas:
            break
        time.sleep(rng.random() * 0.3)
        name = rng.choice(sorted(live_replicas))
        with suppress(ProcessLookupError):
            if rng.random() < 0.7:
                os.kill(live_replicas[name], signal.SIGKILL)
                done.kills.append((time.time(), name))
            else:
                seconds = rng.choice((0.2, 1.0, 4.0))
                os.kill(live_replicas[name], signal.SIGSTOP)
                done.stops.append((time.time(), name, seconds))
                time.sleep(seconds)
                os.kill(live_replicas[name], signal.SIGCONT)
    return done
