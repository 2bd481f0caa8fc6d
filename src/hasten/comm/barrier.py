"""Labelled barrier over a key-value store, which reports missing ranks and their current labels."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from torch.distributed import DistNetworkError, Store

from hasten.errors import MissingRanksError, PeerFailedError

log = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.0002
_LONGEST_PAUSE_S = 0.02
_TELL_AFTER_S = 30.0
_FIRST_LOOK_S = 1.0
_NAMED_RANKS = 64


class RollCall:
    """Numbered check-ins of a fixed set of ranks; each rank calls `wait` in the same order."""

    def __init__(self, store: Store, rank: int, ranks: Sequence[int], timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._ranks = tuple(ranks)
        self._timeout_s = timeout_s
        self._turn = 0
        self._seen = ""  # the ranks' labels at the last check, in case the store is lost

    def wait(self, label: str, timeout_s: float | None = None) -> None:
        """Block until every rank has checked in with this label."""
        self._turn += 1
        limit = self._timeout_s if timeout_s is None else timeout_s
        self._seen = ""
        started = time.monotonic()
        try:
            self._check_in(self._turn, label, limit, started)
        except DistNetworkError as error:
            raise self._lost(label, time.monotonic() - started) from error

    def _check_in(self, turn: int, label: str, limit: float, started: float) -> None:
        store = self._store
        store.set(f"{turn}/{self._rank}", label)
        if store.add(f"{turn}/count/{label}", 1) == len(self._ranks):
            store.set(f"{turn}/open", "1")
            self._forget(turn - 1, label)
            return
        pause, told, next_look_s = _FIRST_PAUSE_S, False, _FIRST_LOOK_S
        while not store.check([f"{turn}/open"]):
            waited = time.monotonic() - started
            if waited > limit:
                raise self._missing(turn, label, limit)
            if waited > next_look_s:
                self._seen, next_look_s = self._glance(turn, label), 2 * waited
            if waited > _TELL_AFTER_S and not told:
                told = True
                missing, text = self._whereabouts(turn, label)
                if self._rank == next(
                    rank for rank in self._ranks if rank not in missing
                ):  # one logs for all waiting ranks
                    log.warning("rank %d has waited %.0f s at %r: %s", self._rank, waited, label, text)
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)

    def _glance(self, turn: int, label: str) -> str:
        """Return the label of each rank; in large worlds only the number of arrived ranks, because every waiting rank asks."""
        if len(self._ranks) <= _NAMED_RANKS:
            return self._whereabouts(turn, label)[1]
        return f"{self._store.add(f'{turn}/count/{label}', 0)} of {len(self._ranks)} ranks had arrived"

    def _whereabouts(self, turn: int, label: str) -> tuple[tuple[int, ...], str]:
        absent, elsewhere = [], []
        for rank in self._ranks:
            if not self._store.check([f"{turn}/{rank}"]):
                absent.append(rank)
            elif (other := self._store.get(f"{turn}/{rank}").decode()) != label:
                elsewhere.append((rank, other))
        parts = [f"rank {rank} has not arrived" for rank in absent]
        parts += [f"rank {rank} is at {other!r} instead" for rank, other in elsewhere]
        return (*absent, *(rank for rank, _ in elsewhere)), "; ".join(parts) or "everyone has arrived"

    def _missing(self, turn: int, label: str, limit: float) -> MissingRanksError:
        missing, text = self._whereabouts(turn, label)
        return MissingRanksError(
            f"rank {self._rank} waited {limit:g} s at {label!r} and not all of ranks {list(self._ranks)} came: {text}. "
            "Every rank must make this call: move it out of `if is_main_process:` blocks, or look for the error "
            "that stopped the missing ranks.",
            missing,
        )

    def _lost(self, label: str, waited_s: float) -> PeerFailedError:
        seen = f" When last seen: {self._seen}." if self._seen else ""
        return PeerFailedError(
            f"rank {self._rank} lost the group's store after {waited_s:.1f} s at {label!r}: the process that serves it (rank 0, or "
            f"the launcher of machine 0) has ended, so ranks {list(self._ranks)} cannot meet any more.{seen} Look for the "
            "error that ended it; this rank only noticed."
        )

    def _forget(self, turn: int, label: str) -> None:
        # Every rank has passed the previous turn, so its keys can be deleted; a different label of that turn is not
        # known here, which leaves at most one small counter behind.
        if turn < 1:
            return
        for key in (f"{turn}/open", f"{turn}/count/{label}", *(f"{turn}/{rank}" for rank in self._ranks)):
            self._store.delete_key(key)
