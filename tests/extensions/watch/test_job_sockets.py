"""Who may ask a rank how it is: its owner, through a private folder; sockets that nobody serves are recognised and removed."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from hasten.cli.main import main
from hasten.comm.collective_log import CollectiveRecord
from hasten.errors import CommError
from hasten.extensions.watch.job_sockets import (
    Address,
    live_sockets,
    private_folder,
    request_status,
)
from hasten.extensions.watch.observe import Observer
from hasten.extensions.watch.status_server import StatusServer
from hasten.runtime.topology import Topology

NOBODY = 65534


@contextmanager
def served(folder: Path) -> Iterator[Path]:
    """The socket of a desk that a thread beside this one serves."""
    status_server = StatusServer(
        Observer(3, CollectiveRecord(), lambda: 7),
        Topology(rank=3, world_size=8),
        torch.device("cpu"),
        folder,
    )
    status_server.start()
    try:
        yield folder / Address(os.getppid(), 3, os.getpid()).name
    finally:
        status_server.close()


def test_a_desk_answers_its_owner_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    with served(folder) as path:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        for _ in range(3):
            answer = request_status(path, {"stacks": True})
            assert answer is not None
            assert (
                answer["rank"],
                answer["world_size"],
                answer["step"],
                answer["pid"],
            ) == (3, 8, 7, os.getpid())
            assert any("test_a_desk_answers" in line for line in answer["stack"])
            assert answer["memory"]["resident"] > 2**20
    assert list(folder.iterdir()) == []


def test_nonsense_does_not_end_the_desk(tmp_path: Path) -> None:
    with served(tmp_path / "private") as path:
        assert request_status(path, ["not", "a", "mapping"]) is None  # type: ignore[arg-type]  # on purpose
        assert request_status(path, {}) is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to run a process as another user")
def test_another_user_is_refused_by_the_folder_and_by_credentials() -> None:
    with TemporaryDirectory(dir="/tmp") as outside:
        Path(outside).chmod(0o755)
        with served(Path(outside) / "private") as path:
            assert _as_nobody(path) == "PermissionError"
            path.parent.chmod(0o755)
            path.chmod(0o666)  # now only the credentials are left
            assert _as_nobody(path) == "no answer"
            assert request_status(path, {}) is not None


def _as_nobody(path: Path) -> str:
    """What a process of another user gets from the socket."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(NOBODY)
        received = "an answer"
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(10)
                connection.connect(str(path))
                connection.sendall(b"{}\n")
                received = "an answer" if connection.recv(100) else "no answer"
        except ConnectionError:
            received = "no answer"
        except OSError as error:
            received = type(error).__name__
        finally:
            os.write(writing, received.encode())
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        return pipe.read()


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(CommError, match="chmod 700"):
        private_folder(folder)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(CommError, match="other users could impersonate this job"):
        private_folder(tmp_path / "link")


def test_sockets_of_ended_processes_are_removed(tmp_path: Path) -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    gone, live_socket = (
        tmp_path / Address(1, 0, done.pid).name,
        tmp_path / Address(1, 1, os.getpid()).name,
    )
    for path in (gone, live_socket, tmp_path / "other.sock", tmp_path / "notes.txt"):
        path.touch()
    assert list(live_sockets(tmp_path)) == [(Address(1, 1, os.getpid()), live_socket)]
    assert not gone.exists()
    assert request_status(live_socket, {}) is None


def test_without_a_job_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main(["top"]) == 2
    assert (
        "no running job of this user was found on this machine"
        in capsys.readouterr().err
    )
