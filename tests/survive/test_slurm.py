"""Replicas in a job of a real SLURM of two nodes: a lost launcher ends neither the job nor the others, and a signal saves the run once.

The nodes are two daemons on this machine. Skipped where SLURM (packages slurm-wlm and munge) is not installed, or without root.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.dist.launch import test_launch_slurm
from tests.dist.launch.test_launch_slurm import Job, run
from tests.survive.checking import check_run
from tests.survive.driving import SURVIVE_TESTS, close, options_of, recent, search_path
from tests.survive.test_preemption import left

pytestmark = pytest.mark.timeout(900)
LIMIT_S = 300.0
slurm = test_launch_slurm.slurm


def submit(env: Mapping[str, str], folder: Path, options: Mapping[str, Any]) -> Job:
    """Submit a job of two machines, with one replica on each."""
    variables = {**env, "PYTHONPATH": search_path()}
    command = [
        sys.executable,
        "-m",
        "hasten.cli.main",
        "launch",
        "--cpu",
        "--num_machines=2",
        "--replicas=2",
    ]
    command += [
        "--submit=slurm",
        "--submit_options=output=log-%j",
        str(SURVIVE_TESTS / "replica_program.py"),
        str(folder),
    ]
    number = run(variables, *command, json.dumps(options), cwd=folder).split()[-1]
    return Job(variables, number, folder)


@pytest.fixture
def cancelled() -> Iterator[list[Job]]:
    """Cancel the jobs of a test that has failed."""
    jobs: list[Job] = []
    yield jobs
    for job in jobs:
        if "JobState=COMPLETED" not in job.show():
            job.cancel("--signal=KILL", "--full")


def launchers(job: Job) -> dict[str, int]:
    """Return the launcher's process on each node."""
    pids_by_node: dict[str, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words, variables = (
                (path / name).read_bytes().split(b"\0")
                for name in ("cmdline", "environ")
            )
        except OSError:  # it has ended
            continue
        environment = dict(
            assignment.decode(errors="replace").partition("=")[::2]
            for assignment in variables
        )
        if (
            environment.get("SLURM_JOB_ID") == job.number
            and b"hasten.cli.main" in words[:3]
            and "SLURM_NODEID" in environment
        ):
            pids_by_node[environment["SLURM_NODEID"]] = int(path.name)
    return pids_by_node


def test_a_lost_launcher_ends_neither_the_job_nor_the_other_node(
    slurm: dict[str, str], tmp_path: Path, cancelled: list[Job]
) -> None:
    options = options_of({"size": 202, "open": True, "sleep": 0.04})
    job = submit(slurm, tmp_path, options)
    cancelled.append(job)
    job.wait(lambda: sorted(recent(tmp_path, 1.0)) == ["0", "1"], LIMIT_S)
    os.kill(launchers(job)["1"], signal.SIGKILL)
    killed = time.time()
    job.wait(
        lambda: time.time() > killed + 8.0 and sorted(recent(tmp_path, 1.0)) == ["0"],
        LIMIT_S,
    )
    options["epochs"] = close(tmp_path)
    job.wait(
        lambda: (
            not {"RUNNING", "COMPLETING"}
            & set(re.findall(r"JobState=(\w+)", job.show()))
        ),
        LIMIT_S,
    )
    # the exit code is that of machine 0
    assert "JobState=COMPLETED" in job.show(), job.show() + job.log()
    updates = check_run(tmp_path, options)
    assert updates[-1]["contributors"] == ["0"]


@pytest.mark.parametrize(
    "words", ["--signal=USR1", "--signal=TERM", "--signal=USR1 --batch"]
)
def test_a_signal_saves_the_run_once_and_requeues_the_job(
    slurm: dict[str, str], tmp_path: Path, cancelled: list[Job], words: str
) -> None:
    """SLURM signals launchers and replicas at once, or the batch shell alone."""
    options = options_of(
        {"size": 202, "open": True, "sleep": 0.03, "preemptible": True}
    )
    job = submit(slurm, tmp_path, options)
    cancelled.append(job)
    job.wait(lambda: sorted(recent(tmp_path, 1.0)) == ["0", "1"], LIMIT_S)
    job.cancel(*words.split())
    job.wait_for_requeue(1)
    left_replicas = left(tmp_path)
    assert len(left_replicas) == 2, job.log()
    assert len({step for step, _ in left_replicas}) == 1  # the same update
    assert sum(bool(checkpoint_path) for _, checkpoint_path in left_replicas) == 1
    job.wait(lambda: sorted(recent(tmp_path, 1.0)) == ["0", "1"], LIMIT_S)
    options["epochs"] = close(tmp_path)
    job.wait(lambda: "JobState=COMPLETED" in job.show(), LIMIT_S)
    check_run(tmp_path, options)
