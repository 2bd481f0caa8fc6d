"""The batch scripts for SLURM, run by a real shell with stand-ins for SLURM's commands: what they do with exit codes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

import pytest

from hasten.config import handoff
from hasten.config.resolve import resolve
from hasten.launch.base import Host, LaunchRequest, Target
from hasten.launch.cluster.slurm import plan_submit

EXAMPLE: Final = Path(__file__).parents[3] / "examples" / "slurm" / "train.sbatch"


def planned(folder: Path) -> str:
    """The script that `hasten launch --submit slurm` writes."""
    resolved = resolve()
    request = LaunchRequest(resolved.config, Target("train.py", ("--data", "my data")), handoff.pack(resolved))
    (script,) = plan_submit(request, Host(name="login"), (), str(folder)).files
    return script.text


RUNNING: Final = "JobState=RUNNING Reason=None PreemptTime=None"
PREEMPTED: Final = "JobState=RUNNING Reason=None PreemptTime=2026-01-01T00:00:00"
CANCELLED: Final = "JobState=COMPLETING Reason=None PreemptTime=None"
TIME_IS_UP: Final = "JobState=COMPLETING Reason=TimeLimit PreemptTime=None"


def run_script(folder: Path, which: str, srun: str, state: str = RUNNING, **variables: str) -> tuple[int, list[str]]:
    """The exit code of a batch script, and the jobs it has put back into the queue."""
    scontrol = f'if [ "$1" = show ]; then echo "$3 {state}" | grep -v "^$"; else echo $@ >> told; fi'
    for name, text in (("srun", srun), ("scontrol", scontrol)):
        command = folder / name
        command.write_text(f"#!/bin/bash\n{text}\n")
        command.chmod(0o755)
    script = planned(folder) if which == "planned" else EXAMPLE.read_text()
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "77", **variables}
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True)
    assert not done.stderr
    told = folder / "told"
    return done.returncode, told.read_text().splitlines() if told.exists() else []


@pytest.mark.parametrize("which", ["planned", "example"])
@pytest.mark.parametrize(
    ("code", "state", "requeued"),
    [
        (0, RUNNING, False),
        (1, RUNNING, False),
        (85, RUNNING, True),
        (85, PREEMPTED, True),
        (85, TIME_IS_UP, True),
        (85, CANCELLED, False),
        (137, RUNNING, False),
        (143, RUNNING, False),
        (143, TIME_IS_UP, False),
        (143, PREEMPTED, True),
        (1, PREEMPTED, False),
    ],
)
def test_a_job_that_has_saved_goes_back_into_the_queue(
    tmp_path: Path, which: str, code: int, state: str, requeued: bool
) -> None:
    ended = run_script(tmp_path, which, f"exit {code}", state)
    assert ended == (code, ["requeue 77"] if requeued else [])


@pytest.mark.parametrize("which", ["planned", "example"])
def test_a_task_of_an_array_goes_back_alone(tmp_path: Path, which: str) -> None:
    array = {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3"}
    assert run_script(tmp_path, which, "exit 85", **array) == (85, ["requeue 77_3"])


@pytest.mark.parametrize("which", ["planned", "example"])
@pytest.mark.parametrize("number", ["TERM", "USR1"])
def test_a_signal_to_the_shell_alone_reaches_the_step(tmp_path: Path, which: str, number: str) -> None:
    srun = f"trap 'sleep 0.2; exit 85' USR1; sleep 0.3; kill -{number} $PPID; for i in {{1..100}}; do sleep 0.1; done; exit 1"
    assert run_script(tmp_path, which, srun) == (85, ["requeue 77"])


def test_no_requeue_is_an_option() -> None:
    config = resolve(code={"launch.submit_options": {"requeue": False}})
    request = LaunchRequest(config.config, Target("train.py"), handoff.pack(config))
    (script,) = plan_submit(request, Host(name="login"), (), "/job").files
    assert "requeue" not in script.text
