"""The roll call before a process group is formed: every rank is there within the init timeout, and all mean the same world.

torch waits for its ranks with the timeout of collectives, half an hour, and ranks that were told different world sizes wait in vain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Final

from torch.distributed import Store

from hasten.errors import PeerFailedError, TopologyError
from hasten.runtime.nodelist import ranks_in_words

_FINE: Final = "fine"
_LONGEST_PAUSE_S: Final = 0.5
_LOOK_S: Final = 1.0

Ended = Callable[[], Mapping[int, int]]
"""Exit codes of the ranks that have ended, as far as the launcher knows."""


def call_roll(store: Store, rank: int, size: int, within: timedelta, ended: Ended = dict) -> None:
    """Return when all ranks are there. Ranks: every rank.

    Raises: TopologyError on every rank that is there when two differ in the world's size; PeerFailedError when a rank has ended without
    coming; RuntimeError when the time is up.
    """
    deadline = time.monotonic() + within.total_seconds()
    store.set(f"roll/{rank}", str(size))
    if rank == 0:
        store.set("roll", _answer(store, size, deadline, ended))
    _wait(store, "roll", deadline, ended, range(size))
    answer = store.get("roll").decode()
    if answer != _FINE:
        raise TopologyError(answer)


def _answer(store: Store, size: int, deadline: float, ended: Ended) -> str:
    """What rank 0 tells all: that they agree, or who does not."""
    for other in range(1, size):
        _wait(store, f"roll/{other}", deadline, ended, range(other, size))
        told = int(store.get(f"roll/{other}"))
        if told != size:
            return (
                f"rank {other} was started with WORLD_SIZE={told} and rank 0 with WORLD_SIZE={size}, so they would wait for ranks that "
                "do not exist. Start all ranks of the job with the same number of processes and machines, and end what is left of "
                "other jobs that meet at this address."
            )
    return _FINE


def _wait(store: Store, key: str, deadline: float, ended: Ended, ranks: Collection[int]) -> None:
    """Return when the key is there, unless one of `ranks` has ended without coming."""
    started = looked = time.monotonic()
    while not store.check([key]):
        now = time.monotonic()
        if now > deadline:
            raise RuntimeError("not all ranks have come")
        if now - looked > _LOOK_S:
            looked = now
            gone = {rank: code for rank, code in ended().items() if rank in ranks}
            absent = {rank: code for rank, code in gone.items() if not store.check([f"roll/{rank}"])}
            if absent and not store.check([key]):
                raise PeerFailedError(_ended_words(absent))
        time.sleep(min(0.002 + 0.05 * (now - started), _LONGEST_PAUSE_S))


def _ended_words(codes: Mapping[int, int]) -> str:
    how = ", ".join(sorted({f"exit code {code}" for code in codes.values()}))
    return (
        f"{ranks_in_words(sorted(codes))} ended ({how}) before making an Accelerator, so the other ranks would wait for it in vain. Let "
        "every rank make the Accelerator before it may leave: look for a sys.exit or return that depends on the rank."
    )
