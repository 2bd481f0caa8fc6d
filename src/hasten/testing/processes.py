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
from hasten.testing.job import (
    CONTROL_MESSAGE,
    FORK_VERB,
    LOAD_VERB,
    READY_VERB,
    WAIT_VERB,
)

START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 10.0


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
        for task_file in Path(f"/proc/{self.pid}/task").glob("*/children"):
            with suppress(OSError):  # the thread ended in the meantime
                for pid in task_file.read_text().split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)

    def signal(self, signal_number: int) -> None:
        """Send a signal, unless the process has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal_number)


class Zygote:
    """Process that has imported torch and forks workers."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._log = folder / "zygote.log"
        self._control, zygote_socket = socket.socketpair()
        self._ready = False
        try:
            with zygote_socket, self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "hasten.testing.zygote",
                        str(zygote_socket.fileno()),
                        str(folder),
                    ],
                    pass_fds=(zygote_socket.fileno(),),
                    env={
                        **env,
                        "OMP_NUM_THREADS": "1",
                        "PYTHONPATH": os.pathsep.join(
                            module_folder for module_folder in sys.path if module_folder
                        ),
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
        pool_socket, worker_socket = socket.socketpair()
        with worker_socket:
            socket.send_fds(
                self._control,
                [CONTROL_MESSAGE.pack(FORK_VERB, 0)],
                [worker_socket.fileno()],
            )
            pid = self._read_answer(START_TIMEOUT_S)
        return Worker(pid, Connection(pool_socket.detach()))

    def load(self, module: str) -> bool:
        """Import a module; return whether the process had not imported it before."""
        self._wait_until_ready()
        encoded_name = module.encode()
        self._control.sendall(
            CONTROL_MESSAGE.pack(LOAD_VERB, len(encoded_name)) + encoded_name
        )
        return bool(self._read_answer(START_TIMEOUT_S))

    def exit_code(self, worker: Worker) -> int:
        """Return the exit code of an ending worker, or minus the signal that killed it."""
        self._control.sendall(CONTROL_MESSAGE.pack(WAIT_VERB, worker.pid))
        return self._read_answer(STOP_TIMEOUT_S)

    def close(self) -> None:
        """End the process and all its workers."""
        self._control.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _wait_until_ready(self) -> None:
        if not self._ready:
            self._read_answer(START_TIMEOUT_S)
            self._ready = True

    def _read_answer(self, timeout_s: float) -> int:
        self._control.settimeout(timeout_s)
        try:
            message = self._control.recv(CONTROL_MESSAGE.size, socket.MSG_WAITALL)
        except (TimeoutError, ConnectionError) as error:
            raise self._make_error(f"did not answer ({error})") from error
        if len(message) < CONTROL_MESSAGE.size:
            raise self._make_error(
                f"ended with exit code {self._process.wait(STOP_TIMEOUT_S)}"
            )
        message_verb, number = CONTROL_MESSAGE.unpack(message)
        assert message_verb in (READY_VERB, FORK_VERB, WAIT_VERB, LOAD_VERB), (
            f"unexpected verb {message_verb!r}"
        )
        return int(number)

    def _make_error(self, failure: str) -> LaunchError:
        log_tail = self._log.read_text(errors="replace")[-2000:]
        return LaunchError(
            f"the process that starts the pool's workers {failure}, so no test can run on several ranks. Its output:\n{log_tail}"
        )
