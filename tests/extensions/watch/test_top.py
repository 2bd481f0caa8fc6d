"""`hasten top` beside a job of two real ranks under `hasten launch`: what it shows is what they do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hasten.cli.main import main
from hasten.extensions.watch.job_sockets import live_sockets

JOB = """
import logging, pathlib, sys, time, torch
from hasten import Accelerator

logging.basicConfig(level="INFO")
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

def slow_part():
    time.sleep(0.2)

logging.getLogger("mine").info("training begins on rank %d", accelerator.process_index)
while not pathlib.Path(sys.argv[1]).exists():
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
    if accelerator.process_index == 1:
        slow_part()
    accelerator.gather(torch.ones(1))
    accelerator.wait_for_everyone()
    if accelerator.gather(torch.tensor([int(pathlib.Path(sys.argv[1]).exists())])).any():
        break
"""


@pytest.mark.exhaustive
def test_a_second_process_sees_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, stop, sockets = tmp_path / "job.py", tmp_path / "stop", tmp_path / "hasten"
    script.write_text(JOB)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    launched = [
        sys.executable,
        "-m",
        "hasten.cli.main",
        "launch",
        "--cpu",
        "--num_processes",
        "2",
        str(script),
        str(stop),
    ]
    with (tmp_path / "out").open("w") as out:
        job = subprocess.Popen(launched, stdout=out, stderr=out, start_new_session=True)
    try:
        until = time.monotonic() + 120
        while len(list(live_sockets(sockets))) < 2:
            assert time.monotonic() < until, (tmp_path / "out").read_text()
            assert job.poll() is None, (tmp_path / "out").read_text()
            time.sleep(0.2)
        command = [sys.executable, "-m", "hasten.cli.main", "top", "--json", "--stacks"]
        first = second = json.loads(
            subprocess.run(command, capture_output=True, check=True).stdout
        )
        while not all(
            later["step"] > earlier["step"]
            for earlier, later in zip(first, second, strict=True)
        ):
            assert time.monotonic() < until, "the steps grow"
            second = json.loads(
                subprocess.run(command, capture_output=True, check=True).stdout
            )
        assert [status["rank"] for status in first] == [0, 1]
        assert {status["world_size"] for status in first} == {2}
        assert len({status["pid"] for status in first}) == 2
        assert any(
            any("job.py" in line for line in status["stack"])
            for status in (*first, *second)
        )
        capsys.readouterr()
        number = str(next(iter(live_sockets(sockets)))[0].job)
        assert main(["top", number, "--json"]) == 0
        assert main(["top", "1", "--json"]) == 2
        assert f"the running jobs are {number}" in capsys.readouterr().err

        stop.touch()
        assert job.wait(120) == 0, (tmp_path / "out").read_text()
        assert list(sockets.iterdir()) == [], "removed at exit"
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


TRAINING_SCRIPT = """
import pathlib, sys, time, torch
from hasten import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
while not pathlib.Path(sys.argv[1]).exists():
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.1)
"""


def test_a_job_of_one_process_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, stop, sockets = (
        tmp_path / "alone.py",
        tmp_path / "stop",
        tmp_path / "hasten",
    )
    script.write_text(TRAINING_SCRIPT)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    command = [
        sys.executable,
        "-m",
        "hasten.cli.main",
        "launch",
        "--cpu",
        "--num_processes=1",
        str(script),
        str(stop),
    ]
    with (tmp_path / "out").open("w") as out:
        job = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        until = time.monotonic() + 100
        while not list(live_sockets(sockets)):
            assert time.monotonic() < until, (tmp_path / "out").read_text()
            assert job.poll() is None, (tmp_path / "out").read_text()
            time.sleep(0.2)
        assert main(["top", "--json"]) == 0
        (status,) = json.loads(capsys.readouterr().out)
        assert (status["rank"], status["world_size"]) == (0, 1)
        stop.touch()
        assert job.wait(60) == 0, (tmp_path / "out").read_text()
        assert list(sockets.iterdir()) == [], "removed at exit"
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf"])
def test_an_interval_that_is_none_is_refused(
    interval: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", f"--interval={interval}"]) == 2
    assert "seconds above 0" in capsys.readouterr().err
