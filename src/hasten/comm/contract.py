"""Contract: a check over the store, before a collective runs, that all members are about to run the same one."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from torch import Tensor
from torch.distributed import Store

from hasten.errors import MismatchError, MissingRanksError

log = logging.getLogger(__name__)
_FIRST_PAUSE_S: Final = 0.0002
_LONGEST_PAUSE_S: Final = 0.02
_BETWEEN: Final = " at "


class Contract:
    """Numbered checks of a fixed set of ranks. Slow (two round trips to the store per collective), so used in debug mode only."""

    def __init__(self, store: Store, rank: int, ranks: Sequence[int], timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._ranks = tuple(ranks)
        self._timeout_s = timeout_s
        self._turn = 0
        self._warned: set[tuple[str, ...]] = set()

    def check(self, op: str, x: Tensor, file: str, line: int) -> None:
        """Block until every member is about to run the same collective.

        Raises: MismatchError on every member if one is about to run another; MissingRanksError naming the ranks
        that do not arrive.
        """
        self._turn += 1
        what = f"{op} of {list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        self._store.set(f"{self._turn}/{self._rank}", f"{what}{_BETWEEN}{Path(file).name}:{line}")
        if self._turn > 2:  # every rank has read the turn before the last
            self._store.delete_key(f"{self._turn - 2}/{self._rank}")
        everyone = self._read_all(what)
        sites = tuple(everyone[rank].rpartition(_BETWEEN)[2] for rank in self._ranks)
        if len(set(sites)) > 1 and sites not in self._warned and self._rank == self._ranks[0]:  # one logs for all
            self._warned.add(sites)
            log.warning("the ranks call the same collective from different lines, which is right only if you meant it: %s",
                        _table(everyone))  # fmt: skip

    def _read_all(self, what: str) -> dict[int, str]:
        found: dict[int, str] = {}
        pause, started = _FIRST_PAUSE_S, time.monotonic()
        while len(found) < len(self._ranks):
            for rank in self._ranks:
                key = f"{self._turn}/{rank}"
                if rank not in found and self._store.check([key]):
                    found[rank] = self._store.get(key).decode()
            if any(text.rpartition(_BETWEEN)[0] != what for text in found.values()):
                raise self._mismatch(found)
            if len(found) < len(self._ranks):
                if time.monotonic() - started > self._timeout_s:
                    raise self._missing(found)
                time.sleep(pause)
                pause = min(pause * 1.5, _LONGEST_PAUSE_S)
        return found

    def _mismatch(self, found: dict[int, str]) -> MismatchError:
        return MismatchError(
            f"rank {self._rank}: the ranks are about to run different collectives (number {self._turn} of this group), which would "
            f"end in a hang or in garbage: {_table(found)}. Make the same calls with the same shapes and dtypes in the same order on "
            f"every rank; a call inside `if is_main_process:` is the usual cause."
        )

    def _missing(self, found: dict[int, str]) -> MissingRanksError:
        missing = tuple(rank for rank in self._ranks if rank not in found)
        return MissingRanksError(
            f"rank {self._rank} waited {self._timeout_s:g} s with {found[self._rank]}, and ranks {list(missing)} did not come to any "
            f"collective of this group. Every rank must make this call: move it out of `if is_main_process:` blocks, or look "
            f"for what keeps the missing ranks.",
            missing,
        )


def _table(found: dict[int, str]) -> str:
    return "; ".join(f"rank {rank}: {text}" for rank, text in sorted(found.items()))
