"""Says which ranks are missing while this one waits for the process group to form: torch waits in silence."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from typing import Final
from urllib.parse import urlsplit

from torch.distributed import DistError, TCPStore

from hasten.runtime.nodelist import ranks_in_words
from hasten.runtime.store import join
from hasten.runtime.topology import Topology

log = logging.getLogger(__name__)

_PRESENT_AFTER_S: Final = 1.0
_FIRST_WORD_S: Final = 5.0
_ANSWER: Final = timedelta(seconds=5)


@contextlib.contextmanager
def announced_waiting(url: str, topology: Topology, say: Callable[[str], None] = log.warning) -> Iterator[None]:
    """A block that waits for other ranks; after five seconds, and then ever less often, it says who is missing.

    Ranks that have waited a second leave a note in the store at `url`, over a connection of their own: until the group is formed the main
    one is blocked. The lowest rank that is there says who is not; if that is rank 0, which serves the store, all the others do.
    """
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(url, topology, say, over), name="hasten-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * _ANSWER.total_seconds())


def _watch(url: str, topology: Topology, say: Callable[[str], None], over: threading.Event) -> None:
    start, next_word = time.monotonic(), _FIRST_WORD_S
    if over.wait(_PRESENT_AFTER_S):
        return
    notes: TCPStore | None = None
    while not over.wait(0.2):
        try:
            if notes is None and (notes := _connect(url)) is not None:
                notes.set(_key(topology, topology.rank), "")
            elapsed = time.monotonic() - start
            if elapsed < next_word:
                continue
            next_word *= 2
            words = _words(notes, topology)
        except (DistError, OSError):  # rank 0 went away: the main thread is told so by torch
            notes = None
            continue
        if words and not over.is_set():
            say(f"rank {topology.rank} of {topology.world_size} waits for {words} at {url} ({elapsed:.0f} s)")


def _words(notes: TCPStore | None, topology: Topology) -> str:
    """Who is missing; nothing if a lower rank is there to say it, or nobody is missing any more."""
    if notes is None:
        return "the others" if topology.is_main else "rank 0"
    ranks = range(topology.world_size)
    missing = [rank for rank in ranks if not notes.check([_key(topology, rank)])]
    if any(rank not in missing for rank in range(topology.rank)):
        return ""
    return ranks_in_words(missing)


def _key(topology: Topology, rank: int) -> str:
    return f"hasten/{topology.restart_count}/waiting/{rank}"


def _connect(url: str) -> TCPStore | None:
    """A connection to the store at `url`; None if nobody serves one there yet."""
    place = urlsplit(url)
    if place.scheme != "tcp" or not place.hostname or not place.port:
        return None
    try:
        with closing(socket.create_connection((place.hostname, place.port), timeout=1.0)):
            pass
    except OSError:
        return None
    return join(place.hostname, place.port, _ANSWER)
