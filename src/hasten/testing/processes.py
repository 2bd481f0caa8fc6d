"""Processes behind the pool: the zygote, which forks workers, and one handle per worker."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from hasten.errors import LaunchError
from hasten.testing.job import FORK, LOAD, MESSAGE, READY, WAIT

START_S: Final = 120.0
STOP_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Worker:
    """Worker process with its pipe."""

    pid: int
    pipe: Connection

    def kill(self) -> None:
        """Kill the process immediately."""
        self.pipe.close()
        self.signal(signal.SIGKILL)

    def kill_children(self) -> None:
        """Kill the process's child processes, which would outlive it, where /proc names them."""
        for task in Path(f"/proc/{self.pid}/task").glob("*/children"):
            with suppress(OSError):  # the thread ended in the meantime
                for pid in task.read_text().split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


class Zygote:
    """Process that has imported torch and forks workers."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._log = folder / "zygote.log"
        self._control, theirs = socket.socketpair()
        self._ready = False
        try:
            with theirs, self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "hasten.testing.zygote",
                        str(theirs.fileno()),
                        str(folder),
                    ],
                    pass_fds=(theirs.fileno(),),
                    env={
                        **env,
                        "OMP_NUM_THREADS": "1",
                        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # Ctrl-C is for the caller, which then ends the workers
                    start_new_session=True,
                )
        except BaseException:
            self._control.close()
            raise

    def fork(self) -> Worker:
        """Fork a new worker, in a few milliseconds."""
        self._wait_until_ready()
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [MESSAGE.pack(FORK, 0)], [theirs.fileno()])
            pid = self._answer(START_S)
        return Worker(pid, Connection(ours.detach()))

    def load(self, module: str) -> bool:
        """Import a module; return whether the process had not imported it before."""
        self._wait_until_ready()
        name = module.encode()
        self._control.sendall(MESSAGE.pack(LOAD, len(name)) + name)
        return bool(self._answer(START_S))

    def exit_code(self, worker: Worker) -> int:
        """Return the exit code of an ending worker, or minus the signal that killed it."""
        self._control.sendall(MESSAGE.pack(WAIT, worker.pid))
        return self._answer(STOP_S)

    def close(self) -> None:
        """End the process and all its workers."""
        self._control.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _wait_until_ready(self) -> None:
        if not self._ready:
            self._answer(START_S)
            self._ready = True

    def _answer(self, timeout_s: float) -> int:
        self._control.settimeout(timeout_s)
        try:
            data = self._control.recv(MESSAGE.size, socket.MSG_WAITALL)
        except (TimeoutError, ConnectionError) as error:
            raise self._broken(f"did not answer ({error})") from error
        if len(data) < MESSAGE.size:
            raise self._broken(f"ended with exit code {self._process.wait(STOP_S)}")
        verb, number = MESSAGE.unpack(data)
        assert verb in (READY, FORK, WAIT, LOAD), f"unexpected verb {verb!r}"
        return int(number)

    def _broken(self, what: str) -> LaunchError:
        tail = self._log.read_text(errors="replace")[-2000:]
        return LaunchError(
            f"the process that starts the pool's workers {what}, so no test can run on several ranks. Its output:\n{tail}"
        )
