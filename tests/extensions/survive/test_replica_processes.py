"""The processes of a replica: the rank that ended it is found, and the others end with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hasten.config.root import Config
from hasten.config.sections.launch import LaunchConfig
from hasten.errors import ConfigError
from hasten.extensions.survive.crew import Crew
from hasten.extensions.survive.launch_target import (
    processes_per_replica,
    settings_of_replica,
)
from hasten.extensions.survive.replica_machines import OneMachine
from hasten.extensions.survive.replica_processes import ReplicaProcesses
from hasten.extensions.survive.settings import SurviveSettings
from hasten.launch.base import Proc

WAITS = "import time; time.sleep(60)"


def started(folder: Path, *programs: str) -> ReplicaProcesses:
    """Return processes that run these programs."""
    processes = [
        subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
        for program in programs
    ]
    return ReplicaProcesses(
        processes,
        [str(folder / f"{rank}.json") for rank in range(len(processes))],
        time.monotonic(),
        0,
    )


def ended(replica: ReplicaProcesses) -> tuple[int, int] | None:
    """Return what ended the replica, within some seconds."""
    until = time.monotonic() + 20.0
    while (outcome := replica.find_ended_rank()) is None and time.monotonic() < until:
        time.sleep(0.02)
    return outcome


def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    replica = started(tmp_path, WAITS, "import os; os.kill(os.getpid(), 9)")
    assert ended(replica) == (1, -9)
    replica.kill_processes()
    assert [process.poll() for process in replica.processes] == [-9, -9]


def test_a_killed_rank_rather_than_an_error_ended_the_replica(tmp_path: Path) -> None:
    replica = started(
        tmp_path, "raise SystemExit(1)", "import os; os.kill(os.getpid(), 9)"
    )
    for process in replica.processes:
        process.wait(20)
    assert replica.find_ended_rank() == (1, -9)


def test_of_two_errors_the_first_one_ended_the_replica(tmp_path: Path) -> None:
    replica = started(tmp_path, "raise SystemExit(1)", "raise SystemExit(3)")
    for process in replica.processes:
        process.wait(20)
    (tmp_path / "1.json").write_text("{}")
    assert replica.find_ended_rank() == (1, 3)


def test_a_replica_has_ended_when_all_of_its_ranks_have(tmp_path: Path) -> None:
    replica = started(tmp_path, "pass", WAITS)
    replica.processes[0].wait(20)
    assert replica.find_ended_rank() is None
    replica.kill_processes()
    assert ended(started(tmp_path, "pass", "pass")) == (0, 0)


@pytest.mark.parametrize(
    ("replicas", "launch_options", "count"),
    [
        (2, {}, 1),
        (2, {"num_processes": 4}, 2),
        (3, {"num_processes": 3}, 1),
        (2, {"processes_per_machine": 8}, 4),
    ],
)
def test_the_processes_of_all_replicas_are_counted(
    replicas: int, launch_options: dict[str, Any], count: int
) -> None:
    config = Config(launch=LaunchConfig(**launch_options)).replace(
        survive=SurviveSettings(replicas=replicas)
    )
    assert processes_per_replica(config) == count
    settings = {
        ".".join(entry.path): entry.value for entry in settings_of_replica(config)
    }
    assert settings["launch.num_processes"] == count
    assert settings["launch.launcher"] == ("single" if count == 1 else "torchrun")


def test_replicas_of_unequal_size_are_refused() -> None:
    config = Config(launch=LaunchConfig(num_processes=1)).replace(
        survive=SurviveSettings(replicas=2)
    )
    with pytest.raises(ConfigError, match=r"num_processes=1 .*Give a multiple of 2"):
        processes_per_replica(config)


HOLDS_OR_WAITS = """
import os, pathlib, sys, time
folder, name = pathlib.Path(os.environ["HASTEN_SURVIVE_FOLDER"]), os.environ["HASTEN_SURVIVE_REPLICA"]
(folder / f"started-{name}-{os.getpid()}").touch()
if len(list(folder.glob("started-*"))) > 2:
    sys.exit(0)  # the second start finishes the run
if name == "1":
    time.sleep(60)  # it waits to receive the state
while not list(folder.glob("started-1-*")):
    time.sleep(0.01)
(folder / "joined-0").touch()
time.sleep(0.5)
os.kill(os.getpid(), 9)
"""


def test_all_replicas_start_anew_when_the_last_holder_of_the_state_is_lost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    proc = Proc(argv=(sys.executable, "-c", HOLDS_OR_WAITS), env={})
    config = Config().replace(survive=SurviveSettings(replicas=2))
    common = {**os.environ, "HASTEN_SURVIVE_FOLDER": str(tmp_path)}
    assert (
        Crew(proc, common, tmp_path, config, range(2), OneMachine("")).run_replicas()
        == 0
    )
    assert "every replica that held the run's state is lost" in capfd.readouterr().err
    starts = [path.name.split("-")[1] for path in tmp_path.glob("started-*")]
    assert starts.count("1") == 2, (
        "the replica that waited for the state is started again too"
    )
