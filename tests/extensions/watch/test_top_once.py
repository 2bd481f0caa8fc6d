"""`hasten top --once` counts waiting as the live table does: over several looks, not by the last one."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path

import pytest

from hasten.cli.main import main
from hasten.extensions.watch.job_sockets import Address, private_folder


def answer(listener: socket.socket, pattern: list[bool]) -> None:
    """Answer as a rank that waits at the looks of the pattern, until it is asked no more."""
    for waits in pattern:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            status = {
                "rank": 0, "world_size": 2, "host": "here", "pid": os.getpid(), "script": "train.py", "seconds": 3.0, "step": 7,
                "steps_per_s": 1.5, "values": {}, "waits": waits, "at": "train.py:3", "memory": {"resident": 2**30}, "log": [],
            }  # fmt: skip
            connection.sendall(json.dumps(status).encode() + b"\n")


@pytest.mark.parametrize(
    ("pattern", "shown"),
    [
        ([True, *[False, True] * 5], "50%"),
        ([True, *[False] * 9, True], "10%"),
        ([False, *[True] * 9, False], "90%"),
    ],
)
def test_waiting_is_a_share_of_several_looks(
    pattern: list[bool],
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    folder = private_folder(tmp_path / "hasten")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(folder / Address(1, 0, os.getpid(), 0).name))
        listener.listen(4)
        listener.settimeout(20)
        rank = threading.Thread(target=answer, args=(listener, pattern))
        rank.start()
        assert main(["top", "--once", "--interval", "0.2"]) == 0
        rank.join()
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf"])
def test_an_interval_that_is_none_is_refused(
    interval: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", f"--interval={interval}"]) == 2
    assert "seconds above 0" in capsys.readouterr().err
