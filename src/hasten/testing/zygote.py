"""Parent of the pool's workers: imports torch once, then forks a worker on request.

Run as `python -m hasten.testing.zygote FD FOLDER`. The caller does not fork itself because it may have threads, a CUDA context
or other state that does not survive a fork.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import shutil
import signal
import socket
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Final

import torch

from hasten.testing.job import (
    CONTROL_MESSAGE,
    FORK_VERB,
    LOAD_VERB,
    READY_VERB,
    WAIT_VERB,
)
from hasten.testing.worker import serve_pool

PRELOADED_MODULES: Final = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.optim.lr_scheduler",
    "torch.utils.data",
)
OPTIONAL_MODULES: Final = ("_pytest.assertion.rewrite", "pytest")


def main(control_fd: int, folder: str) -> None:
    """Import everything, then serve the pool until it closes its end; then remove its folder and its workers."""
    torch.set_num_threads(1)
    for module_name in PRELOADED_MODULES:
        # a list rather than imports: for their effect, in the forking process only
        importlib.import_module(module_name)
    for module_name in OPTIONAL_MODULES:
        if importlib.util.find_spec(module_name.partition(".")[0]):
            importlib.import_module(module_name)  # only where pytest is installed
    _freeze_objects()
    control = socket.socket(fileno=control_fd)
    control.sendall(CONTROL_MESSAGE.pack(READY_VERB, os.getpid()))
    worker_pids: set[int] = set()
    try:
        while message := _receive_message(control):
            verb, number, fds = message
            if verb == FORK_VERB:
                pid = _fork_worker(control, fds[0])
                worker_pids.add(pid)
                control.sendall(CONTROL_MESSAGE.pack(FORK_VERB, pid))
            elif verb == WAIT_VERB:
                worker_pids.discard(number)
                control.sendall(
                    CONTROL_MESSAGE.pack(
                        WAIT_VERB, os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
                    )
                )
            elif verb == LOAD_VERB:
                control.sendall(
                    CONTROL_MESSAGE.pack(
                        LOAD_VERB,
                        _load_module(control.recv(number, socket.MSG_WAITALL).decode()),
                    )
                )
    finally:
        for pid in worker_pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        shutil.rmtree(folder, ignore_errors=True)


def _freeze_objects() -> None:
    """Let the workers' collectors skip the objects that exist now, so that their pages stay shared."""
    gc.collect()
    gc.freeze()


def _load_module(module_name: str) -> int:
    """Import a module if it is installed; return 1 if that changed something, else 0."""
    if module_name in sys.modules or not importlib.util.find_spec(
        module_name.partition(".")[0]
    ):
        return 0
    # for its effect, in the forking process only; the caller names it
    importlib.import_module(module_name)
    _freeze_objects()
    return 1


def _receive_message(control: socket.socket) -> tuple[bytes, int, list[int]] | None:
    try:
        message, fds, _, _ = socket.recv_fds(control, CONTROL_MESSAGE.size, 1)
    except ConnectionResetError:
        return None
    while 0 < len(message) < CONTROL_MESSAGE.size:
        message += control.recv(CONTROL_MESSAGE.size - len(message))
    if not message:
        return None
    verb, number = CONTROL_MESSAGE.unpack(message)
    return verb, number, list(fds)


def _fork_worker(control: socket.socket, fd: int) -> int:
    pid = os.fork()
    if pid:
        os.close(fd)
        return pid
    status = 1
    try:
        control.close()
        serve_pool(Connection(fd))
        status = 0
    finally:
        # never return into the loop above, and skip exit handlers of imported modules
        os._exit(status)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
