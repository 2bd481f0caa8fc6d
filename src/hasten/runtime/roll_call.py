"""The roll call before a process group is formed: every rank is there within the init timeout, and all mean the same world.

torch waits for its ranks with the timeout of collectives, half an hour, and ranks that were told different world sizes wait in vain.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Final

from torch.distributed import Store

from hasten.errors import TopologyError

_FINE: Final = "fine"


def call_roll(store: Store, rank: int, size: int, within: timedelta) -> None:
    """Return when all ranks are there. Ranks: every rank.

    Raises: TopologyError on every rank that is there when two differ in the world's size; RuntimeError when the time is up.
    """
    store.set(f"roll/{rank}", str(size))
    if rank == 0:
        store.set("roll", _answer(store, size, time.monotonic() + within.total_seconds()))
    store.wait(["roll"], within)
    answer = store.get("roll").decode()
    if answer != _FINE:
        raise TopologyError(answer)


def _answer(store: Store, size: int, deadline: float) -> str:
    """What rank 0 tells all: that they agree, or who does not."""
    for other in range(1, size):
        store.wait([f"roll/{other}"], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        told = int(store.get(f"roll/{other}"))
        if told != size:
            return (
                f"rank {other} was started with WORLD_SIZE={told} and rank 0 with WORLD_SIZE={size}, so they would wait for ranks that "
                "do not exist. Start all ranks of the job with the same number of processes and machines, and end what is left of "
                "other jobs that meet at this address."
            )
    return _FINE
