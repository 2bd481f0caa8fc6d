"""The last resort: a launcher stuck in native code still ends on a signal, and its processes with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from hasten.launch.guard import Interrupted, SignalGuard, kill_groups

pytestmark = pytest.mark.timed


def stuck(folder: Path, signals: int) -> tuple[int, float, str]:
    """Exit code, seconds and last words of a forked launcher that is stuck in a native wait when signals arrive."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            worker = subprocess.Popen(["sleep", "100"], start_new_session=True)
            (folder / "worker").write_text(str(worker.pid))
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            with SignalGuard(
                lambda: [worker.pid],
                grace_s=1.0,
                last_words=lambda words: void(os.write(writer, words.encode())),
            ):
                (folder / "ready").write_text("")
                while True:
                    try:
                        store.wait(["never"], timedelta(seconds=60))
                    except Interrupted:
                        continue  # a launcher that swallows the signal and waits again
        finally:
            os._exit(99)
    os.close(writer)
    while not (folder / "ready").exists():
        time.sleep(0.01)
    time.sleep(0.1)
    start = time.monotonic()
    for _ in range(signals):
        os.kill(child, signal.SIGTERM)
        time.sleep(0.2)
    _, status = os.waitpid(child, 0)
    took = time.monotonic() - start
    words = os.read(reader, 1000).decode()
    os.close(reader)
    return os.waitstatus_to_exitcode(status), took, words


def void(value: object) -> None:
    """Nothing, whatever was returned."""


def gone(pid: int) -> bool:
    """Whether a process has ended (its parent, which is gone too, may not have noticed yet)."""
    try:
        return (
            "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        )
    except OSError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("signals", "why"), [(1, "no process ended within 1 s"), (2, "a second signal")]
)
def test_a_stuck_launcher_ends_with_its_processes(
    tmp_path: Path, signals: int, why: str
) -> None:
    code, took, words = stuck(tmp_path, signals)
    assert code == 128 + signal.SIGTERM
    assert took < 5
    assert words == f"SIGTERM, {why}: all processes are killed now"
    worker = int((tmp_path / "worker").read_text())
    deadline = time.monotonic() + 5
    while not gone(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert gone(worker)


def test_a_guard_leaves_signals_as_it_found_them() -> None:
    handlers = [
        signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ]
    nobody = [2**30]  # a group that cannot exist: with one, the grace is the one given
    with (
        SignalGuard(lambda: nobody, grace_s=60.0, last_words=void),
        pytest.raises(Interrupted, match="SIGTERM"),
    ):
        signal.raise_signal(signal.SIGTERM)
    assert [
        signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ] == handlers


def test_groups_that_are_gone_are_no_matter() -> None:
    done = subprocess.Popen(["true"], start_new_session=True)
    done.wait()
    kill_groups([done.pid])
