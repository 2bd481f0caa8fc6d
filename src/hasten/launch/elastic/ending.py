"""Shutdown of a machine: exchange of failures and agreement on one exit code before the launcher exits.

A scheduler that started one launcher per machine ends the others as soon as the first exits with a nonzero code
(`srun --kill-on-bad-exit`, `mpirun`), and uses the highest code as the job's. So no launcher may exit before all know the code.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Final

from hasten.launch.failure import PREEMPTED, Failure
from hasten.launch.peers import Peers

COLLECT_S: Final = 3.0


def with_others(failures: Sequence[Failure], peers: Peers | None) -> tuple[list[Failure], list[str]]:
    """Return the failures of all machines, and the machines that no longer respond."""
    if peers is None or len(peers.hosts) == 1:
        return list(failures), []
    known = {(f.host, f.rank) for f in failures}
    others: list[Failure] = []
    silent: list[str] = [] if peers.index == 0 else [f"machine 0 ({peers.hosts[0]})"]

    def exchange() -> None:
        peers.publish([f for f in failures if f.host == socket.gethostname()])
        others.extend(f for f in peers.collect(COLLECT_S) if (f.host, f.rank) not in known)
        silent[:] = peers.silent()

    # Machine 0 collects the others' failures while it waits; the others treat a late answer as no answer.
    within((2 if peers.index == 0 else 1) * COLLECT_S + 1, exchange)
    return [*failures, *others], silent


def agreed_exit_code(peers: Peers | None, code: int, *, saving_s: float) -> int:
    """Return the exit code of the job after every machine knows it; `code` if the others do not respond.

    A machine whose ranks have saved waits up to `saving_s` for the others, which may still be saving.
    """
    if peers is None or len(peers.hosts) == 1:
        return code
    agreed = [code]
    wait_s = saving_s if code == PREEMPTED else COLLECT_S

    def agree() -> None:
        agreed[0] = peers.agree(code, wait_s)
        peers.leave(COLLECT_S)

    within(wait_s + COLLECT_S + 1, agree)
    return agreed[0]


def within(seconds: float, talk: Callable[[], None]) -> None:
    """Run `talk` for at most `seconds`: a store call never returns once the network is down."""

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # torch's network errors: machine 0 has exited; partial results count
            talk()

    thread = threading.Thread(target=run, name="hasten-ending", daemon=True)
    thread.start()
    thread.join(seconds)
