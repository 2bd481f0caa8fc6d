"""Metrics, `hasten top` and `hasten report` of a run while its replicas are lost and return."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hasten.extensions.report.run_folder import read_run
from tests.survive.driving import finish, recent, wait_for
from tests.survive.test_whole_loop import start

pytestmark = pytest.mark.timeout(1200)  # processes that load torch, some of them again
LIMIT_S = 400.0
PORT = 21400 + os.getpid() % 9000


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the jobs of this test be the only ones that `hasten top` finds; the path of a socket must be short."""
    with tempfile.TemporaryDirectory(prefix="top-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield


def said(*words: str) -> str:
    """Return what a command of hasten prints."""
    command = [sys.executable, "-m", "hasten", *words]
    wide = {**os.environ, "COLUMNS": "220"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=wide
    ).stdout


def shown(look: Callable[[], str], words: str, run: subprocess.Popen[str]) -> str:
    """Return the first look in which the words are shown."""
    until = time.monotonic() + 60.0
    while time.monotonic() < until and run.poll() is None:
        if re.search(words, text := look()):
            return text
    raise AssertionError(f"{words!r} was not shown:\n{text}")


@pytest.mark.usefixtures("runtime")
def test_lost_and_returned_replicas_are_shown(tmp_path: Path) -> None:
    run = start(tmp_path, 4, "--metrics_port", str(PORT))
    pids = wait_for(run, tmp_path, 2)

    def cluster() -> str:
        return said(
            "top",
            "--once",
            "--interval",
            "0.2",
            "--from",
            f"127.0.0.1:{PORT}-{PORT + 1}",
        )

    def local() -> str:
        return said("top", "--once", "--interval", "0.2")

    assert "2 of 2 ranks" in shown(cluster, "2 replicas, 0 lost", run)
    (tmp_path / "slow").touch()
    os.kill(pids["1"], signal.SIGKILL)
    assert "1 targets without metrics" in shown(
        cluster, "1 replicas, 1 lost, 0 joined, 4 samples given out again", run
    )
    text = shown(
        cluster, "2 replicas, 1 lost, 1 joined, 4 samples given out again", run
    )
    assert "2 of 2 ranks" in text
    text = shown(local, "2 replicas, 1 lost, 1 joined, 4 samples given out again", run)
    assert re.search(r"replica\s+rank\s+pid", text), text
    pid = recent(tmp_path, 3.0)["1"]
    assert re.search(rf"\n\s*1\s+0\s+{pid}\s", text), text
    statuses = json.loads(said("top", "--json"))
    assert [(status["replica"], status["rank"]) for status in statuses] == [
        ("0", 0),
        ("1", 0),
    ]
    (tmp_path / "slow").unlink()
    finish(run, tmp_path, LIMIT_S)
    events = {
        shown_event["event"]: shown_event
        for shown_event in read_run(str(tmp_path / "project")).events
    }
    assert re.fullmatch(
        r"1 in update \d+; 1 left, 4 samples given out again",
        events["replicas lost"]["words"],
    )
    assert re.fullmatch(
        r"1 after update \d+; 2 present", events["replicas joined"]["words"]
    )
    page = tmp_path / "report.html"
    said("report", str(tmp_path / "project"), "-o", str(page))
    for event in ("replicas lost", "replicas joined"):
        assert re.search(
            rf"<td>{event}</td>\s*<td>{events[event]['words']}</td>", page.read_text()
        )
