"""Warm ranks for tests of whole launches: torch is loaded once, and a rank that a launcher starts becomes a fork of this process.

Run as `python rank_zygote.py serve SOCKET [MODULES]`, with further modules to load; a launcher is then given `--no_python PYTHON rank_zygote.py rank SOCKET script args…`.
The rank's stand-in hands over its environment, its folder and its output, passes signals on, and ends as the fork ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType


def stand_in(path: str, argv: list[str]) -> None:
    """Be the process that the launcher sees: ask for a fork, and end like it."""
    link = socket.socket(socket.AF_UNIX)
    link.connect(path)
    order = json.dumps(
        {"argv": argv, "env": dict(os.environ), "cwd": os.getcwd(), "pid": os.getpid()}  # noqa: PTH109 - pathlib costs time
    ).encode()
    socket.send_fds(link, [len(order).to_bytes(4, "big")], [1, 2])
    link.sendall(order)
    pid = int(link.recv(16))

    def pass_on(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    signal.signal(signal.SIGTERM, pass_on)
    code = int(link.recv(16) or b"1")
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(path: str, modules: list[str]) -> None:
    """Fork a rank for every connection until the input ends."""
    import importlib

    import torch._dynamo
    import torch.distributed.fsdp
    from torch import nn

    import hasten.checkpoint.save  # noqa: F401
    from hasten import Accelerator

    for module in modules:
        importlib.import_module(module)
    torch.set_num_threads(1)
    torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert Accelerator is not None
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(8)
    parent = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while os.getppid() == parent:
        link, _ = listener.accept()
        if os.fork():
            link.close()
            continue
        try:
            attend(link)
        finally:
            os._exit(0)


def attend(link: socket.socket) -> None:
    """Fork the rank, tell its pid, wait for its end or for that of its stand-in, and tell its code."""
    head, fds, _, _ = socket.recv_fds(link, 4, 2)
    size, data = int.from_bytes(head, "big"), b""
    while len(data) < size:
        data += link.recv(size - len(data))
    order = json.loads(data)
    pid = os.fork()
    if not pid:
        link.close()
        be_rank(order, fds)
    for fd in fds:
        os.close(fd)
    link.sendall(str(pid).encode().ljust(16))
    watcher = os.fork()
    if not watcher:
        link.recv(1)  # returns when the stand-in is gone
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(ProcessLookupError, BrokenPipeError):
        os.kill(watcher, signal.SIGKILL)
        link.sendall(str(code).encode().ljust(16))


def be_rank(order: dict[str, object], fds: list[int]) -> None:
    """Run the script as `python -m hasten.launch.worker script` would, to the end of the process."""
    import atexit
    import faulthandler
    import threading
    from pathlib import Path

    from hasten.launch import worker
    from hasten.runtime import env

    # run as a script, from any folder
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.support.machines import enter

    del sys.path[0]

    # the script empties this module's names when it takes its place
    leave, system = os._exit, sys
    code = 1
    try:
        os.setsid()
        network = f"/proc/{order['pid']}/ns/net"
        # on another host
        if Path(network).readlink() != Path("/proc/self/ns/net").readlink():
            enter(network)
        os.dup2(fds[0], 1)
        os.dup2(fds[1], 2)
        env.replace_environment(order["env"])  # type: ignore[arg-type]  # decoded JSON
        os.chdir(str(order["cwd"]))
        argv = [str(word) for word in order["argv"]]  # type: ignore[attr-defined]  # decoded JSON
        sys.excepthook = worker.recording_hook(
            Path(os.environ["TORCHELASTIC_ERROR_FILE"]), sys.excepthook
        )
        faulthandler.enable(file=2)
        sys.argv[:] = argv
        try:
            worker._run_script(argv[0], argv[1:])
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException as error:
            system.last_value = error
            system.excepthook(type(error), error, error.__traceback__)
        threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter does at its end
        atexit._run_exitfuncs()
        system.stdout.flush()
        system.stderr.flush()
    finally:
        leave(code)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3:])
    else:
        stand_in(sys.argv[2], sys.argv[3:])
