"""`hasten launch --ray` with an example as it is: the weights of a launch without Ray, also after a worker was killed from outside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.on_ray.toy import QUICK

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


def start(
    folder: Path, *flags: str, script: str = "examples/resume.py"
) -> tuple[subprocess.Popen[str], Path]:
    """Start a launch of an example with two processes; the process, and the file of its output."""
    out = folder / "output.txt"
    words = ["-m", "hasten", "launch", "--cpu", "--num_processes", "2", *flags, script]
    words += (
        ["--epochs", "2", "--out", str(folder / "run")]
        if script == "examples/resume.py"
        else []
    )
    with out.open("w") as stream:
        env = {**os.environ, **QUICK, "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}
        program = [sys.executable, *words]
        return subprocess.Popen(
            program,
            cwd=ROOT,
            env=env,
            stdout=stream,
            stderr=subprocess.STDOUT,
            text=True,
        ), out


def weights(out: Path) -> str:
    """Return the checksum of the weights that the example prints."""
    checksums = re.findall(r"step 46: .* weights (\w+)", out.read_text())
    assert checksums, out.read_text()[-5000:]
    return str(checksums[-1])


def workers_below(pid: int) -> list[int]:
    """Return the processes of Ray's workers that descend from a process, in order of their number."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        try:
            number = int(entry.name)
            parents[number] = int(
                (entry / "stat").read_text().rpartition(")")[2].split()[1]
            )
            names[number] = (entry / "cmdline").read_text()
        except (ValueError, OSError):  # not a process, or it has just ended
            continue

    def descends(process_id: int) -> bool:
        while process_id in parents and process_id != pid:
            process_id = parents[process_id]
        return process_id == pid

    return sorted(
        process_id
        for process_id, name in names.items()
        if name.startswith("ray::RayTrainWorker") and descends(process_id)
    )


def test_an_example_trains_on_ray_as_without_it_although_a_worker_is_killed(
    tmp_path: Path,
) -> None:
    plain, lost = tmp_path / "plain", tmp_path / "lost"
    for folder in (plain, lost):
        folder.mkdir()
    process, expected = start(plain)
    assert process.wait(600) == 0, expected.read_text()[-3000:]

    process, out = start(
        lost,
        "--ray",
        "--ray_address",
        "local",
        "--max_restarts",
        "1",
        "--ray_storage",
        str(lost / "storage"),
    )
    first = lost / "run" / "checkpoints" / "checkpoint_0" / "manifest.json"
    while not first.exists() and process.poll() is None:
        time.sleep(0.05)
    worker_pids = workers_below(process.pid)
    assert len(worker_pids) == 2, out.read_text()[-3000:]
    os.kill(worker_pids[1], signal.SIGKILL)
    assert process.wait(600) == 0, out.read_text()[-5000:]
    assert weights(out) == weights(expected)
    printed = out.read_text()
    assert re.search(
        rf"rank [01] \(Ray actor with pid {worker_pids[1]} on [^)]+\) was lost", printed
    ), printed[-3000:]
    assert "going on after step" in printed


def test_an_error_of_the_script_names_its_rank(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(
        "from hasten import Accelerator\na = Accelerator()\nif a.process_index == 1:\n    raise ValueError('bad label 7')\n"
        "a.wait_for_everyone()\n"
    )
    process, out = start(
        tmp_path,
        "--ray",
        "--ray_address",
        "local",
        "--ray_storage",
        str(tmp_path / "storage"),
        script=str(script),
    )
    assert process.wait(600) == 1
    assert "[hasten] rank 1 failed: ValueError: bad label 7" in out.read_text()
