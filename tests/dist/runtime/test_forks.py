"""Law: a fork of a rank, such as a loader's worker, never destroys the process groups it inherited."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

LIMIT_S = 20.0


class Cycle:
    """An object that only a garbage collection can free."""

    def __init__(self, referent: Any) -> None:
        self.held = referent
        self.itself = self


def gloo_of_one() -> Any:
    """Return a group whose threads are running."""
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs omit its collectives
    group = gloo(dist.HashStore(), 0, 1)
    group.allreduce([torch.ones(3)]).wait()
    return group


def ended_in_time(pid: int) -> bool:
    """Wait for a child, and kill it after the limit. Return True if it ended by itself."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return False


@ranks(2)
def test_a_fork_does_not_collect_a_process_group_of_its_parent(
    ctx: ProcessContext,
) -> None:
    gc.disable()
    try:
        Cycle(gloo_of_one())
        pid = os.fork()
        if pid == 0:
            # hung here: the group's destructor joined threads that exist in the parent only
            gc.collect()
            os._exit(0)
        assert ended_in_time(pid)
    finally:
        gc.enable()
