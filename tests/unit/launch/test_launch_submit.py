"""The batch scripts for SLURM, run by a real shell with stand-ins for SLURM's commands: what they do with exit codes."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from hasten.cli.launch_cmd import make_parser
from hasten.config import handoff
from hasten.config.resolve import resolve
from hasten.errors import ConfigError
from hasten.launch.base import Host, LaunchRequest, Target
from hasten.launch.cluster.slurm import plan_submit

EXAMPLE: Final = Path(__file__).parents[3] / "examples" / "slurm" / "train.sbatch"


def planned_script(folder: Path) -> str:
    """The script that `hasten launch --submit slurm` writes."""
    resolved = resolve()
    request = LaunchRequest(
        resolved.config,
        Target("train.py", ("--data", "my data")),
        handoff.pack_settings(resolved.entries),
    )
    (script,) = plan_submit(
        replace(request, folder=str(folder)), Host(name="login")
    ).files
    return script.text


RUNNING: Final = "JobState=RUNNING Reason=None PreemptTime=None"
PREEMPTED: Final = "JobState=RUNNING Reason=None PreemptTime=2026-01-01T00:00:00"
CANCELLED: Final = "JobState=COMPLETING Reason=None PreemptTime=None"
TIME_IS_UP: Final = "JobState=COMPLETING Reason=TimeLimit PreemptTime=None"


def run_script(
    folder: Path, script_kind: str, srun: str, state: str = RUNNING, **variables: str
) -> tuple[int, list[str]]:
    """The exit code of a batch script, and the jobs it has put back into the queue."""
    return run_text(
        folder,
        planned_script(folder) if script_kind == "planned" else EXAMPLE.read_text(),
        srun,
        state,
        **variables,
    )


def run_text(
    folder: Path, script: str, srun: str, state: str = RUNNING, **variables: str
) -> tuple[int, list[str]]:
    """The same for the text of a script."""
    scontrol = f'if [ "$1" = show ]; then echo "$3 {state}" | grep -v "^$"; else echo $@ >> told; fi'
    for name, text in (("srun", srun), ("scontrol", scontrol)):
        command = folder / name
        command.write_text(f"#!/bin/bash\n{text}\n")
        command.chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "77",
        **variables,
    }
    completed = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True
    )
    assert not completed.stderr
    requeue_log = folder / "told"
    return (
        completed.returncode,
        requeue_log.read_text().splitlines() if requeue_log.exists() else [],
    )


@pytest.mark.parametrize("script_kind", ["planned", "example"])
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
    tmp_path: Path, script_kind: str, code: int, state: str, requeued: bool
) -> None:
    ended = run_script(tmp_path, script_kind, f"exit {code}", state)
    assert ended == (code, ["requeue 77"] if requeued else [])


@pytest.mark.parametrize("script_kind", ["planned", "example"])
def test_a_task_of_an_array_goes_back_alone(tmp_path: Path, script_kind: str) -> None:
    array = {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3"}
    assert run_script(tmp_path, script_kind, "exit 85", **array) == (
        85,
        ["requeue 77_3"],
    )


@pytest.mark.parametrize("script_kind", ["planned", "example"])
@pytest.mark.parametrize("number", ["TERM", "USR1"])
def test_a_signal_to_the_shell_alone_reaches_the_step(
    tmp_path: Path, script_kind: str, number: str
) -> None:
    srun = f"trap 'sleep 0.2; exit 85' USR1; sleep 0.3; kill -{number} $PPID; for i in {{1..100}}; do sleep 0.1; done; exit 1"
    assert run_script(tmp_path, script_kind, srun) == (85, ["requeue 77"])


def test_no_requeue_is_an_option() -> None:
    config = resolve(code={"launch.submit_options": {"requeue": False}})
    request = LaunchRequest(
        config.config, Target("train.py"), handoff.pack_settings(config.entries)
    )
    (script,) = plan_submit(replace(request, folder="/job"), Host(name="login")).files
    assert "requeue" not in script.text


SRUN_OF_TWO: Final = """
echo "$@" >> options
while [ "${1#--}" != "$1" ]; do shift; done
SLURM_PROCID=0 "$@"; first=$?
SLURM_PROCID=1 "$@"; second=$?
exit $((first > second ? first : second))
"""
"""A stand-in that runs both tasks, one after the other, and exits with the largest code, as srun does."""


@pytest.mark.parametrize(
    ("first", "second", "code", "requeued"),
    [
        (0, 0, 0, False),
        (0, 137, 0, False),
        (85, 137, 85, True),
        (1, 0, 1, False),
        (1, 85, 1, False),
    ],
)
def test_the_code_of_a_run_with_replicas_is_that_of_machine_0(
    tmp_path: Path, first: int, second: int, code: int, requeued: bool
) -> None:
    launcher = tmp_path / "python"
    launcher.write_text(
        f'#!/bin/bash\nif [ "$SLURM_PROCID" = 0 ]; then exit {first}; else exit {second}; fi\n'
    )
    launcher.chmod(0o755)
    resolved = resolve(code={"survive.replicas": 2, "launch.num_machines": 2})
    request = LaunchRequest(
        resolved.config, Target("train.py"), handoff.pack_settings(resolved.entries)
    )
    flags = ("--replicas", "2", "--submit", "slurm", "--num_machines", "2")
    (script,) = plan_submit(
        replace(request, flags=flags, folder=str(tmp_path)),
        Host(name="login", python=str(launcher)),
    ).files
    # the loss of a node does not end the job
    assert "\n#SBATCH --no-kill\n" in script.text
    assert (
        f"{launcher} -m hasten.cli.main launch --replicas 2 --num_machines 2"
        in script.text
    )
    assert run_text(tmp_path, script.text, SRUN_OF_TWO) == (
        code,
        ["requeue 77"] if requeued else [],
    )
    assert (
        "--no-kill --kill-on-bad-exit=0 --wait=0" in (tmp_path / "options").read_text()
    )


def test_a_signal_to_replicas_under_slurm_reaches_their_launchers(
    tmp_path: Path,
) -> None:
    """The shell around a launcher must neither end by the signal nor change the exit code."""
    launcher = tmp_path / "python"
    launcher.write_text(
        "#!/bin/bash\ntrap 'exit 85' USR1\nkill -USR1 $PPID $$\nsleep 0.1\nexit 1\n"
    )
    launcher.chmod(0o755)
    resolved = resolve(code={"survive.replicas": 2})
    request = LaunchRequest(
        resolved.config, Target("train.py"), handoff.pack_settings(resolved.entries)
    )
    (script,) = plan_submit(
        replace(request, folder=str(tmp_path)), Host(name="login", python=str(launcher))
    ).files
    assert run_text(tmp_path, script.text, SRUN_OF_TWO) == (85, ["requeue 77"])


def script_with(**settings: object) -> str:
    """The batch script under these settings."""
    resolved = resolve(
        code={f"launch.{name}": value for name, value in settings.items()}
    )
    request = LaunchRequest(
        resolved.config, Target("train.py"), handoff.pack_settings(resolved.entries)
    )
    return plan_submit(request, Host(name="login")).files[0].text


def test_a_list_of_tasks_is_one_option() -> None:
    entries = (
        make_parser()
        .parse_args(["--submit=slurm", "--submit_options=array=0-3,5,time=1:00:00"])
        .settings
    )
    assert resolve(flags=entries).config.launch.submit_options == {
        "array": "0-3,5",
        "time": "1:00:00",
    }


def test_other_nodes_than_machines_are_refused() -> None:
    assert "#SBATCH --nodes=3" in script_with(submit_options={"nodes": 3})
    assert "#SBATCH --nodes=2" in script_with(
        num_machines=2, submit_options={"nodes": 2}
    )
    with pytest.raises(
        ConfigError, match=r"nodes=3 contradicts num_machines=2.*Remove nodes"
    ):
        script_with(num_machines=2, submit_options={"nodes": 3})
