"""Trial draws from the samplers of all ranks, to detect samplers that yield only the indices of their rank."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable
from itertools import islice
from typing import Any, Final

from hasten.comm.base import Comm
from hasten.data.memory import Memory
from hasten.data.rank_differences import different_data
from hasten.data.workers import OwnRng, RandomStates, States, decode_states

# Any in this file: samplers and units are objects of the user.
NUM_UNITS: Final = 64
_MOST_UNITS: Final = 1_000_000
_SKETCH: Final = 4096


def plain_unit(unit: Any) -> Any:
    """Return a unit as numbers and texts. Raises: TypeError for other types."""
    if isinstance(unit, str):
        return str(unit)
    if isinstance(unit, list | tuple):
        return [plain_unit(part) for part in unit]
    return operator.index(unit)


class DrawTrial:
    """Trial draw from this rank's sampler under the first rank's random states; the sampler's state is restored."""

    def __init__(
        self, sampler: Any, epoch: int, seed: int, start: dict[str, Any], keep: Callable[[], Callable[[], None]]
    ) -> None:
        self._sampler = sampler
        self._epoch = epoch
        self._seed = seed
        self._generators = start["generators"]
        self._states: States | None = None if start["process"] is None else decode_states(start["process"])
        self._keep = keep
        self._process = RandomStates()

    def units(self, most: int) -> list[Any] | None:
        """Return the first units; None if they cannot be drawn or compared."""
        put_back = self._keep()
        rng = OwnRng(self._seed, self._process)
        rng.place(self._states)
        try:
            with self._process.kept(), rng.entered():
                Memory(self._sampler, attributes=False).restore(self._generators)
                if hasattr(self._sampler, "set_epoch"):
                    self._sampler.set_epoch(self._epoch)
                return [plain_unit(unit) for unit in islice(iter(self._sampler), most)]
        except Exception:  # the user's sampler: the training loop raises its error when it draws
            return None
        finally:
            put_back()

    def compare(self, gathered: list[list[Any] | None], comm: Comm) -> None:
        """Raise on every rank when the samplers of ranks yield different indices; `gathered` holds the first ones of each.

        Ranks: every rank.
        """
        if any(one is None or one != gathered[0] for one in gathered) and all(one is not None for one in gathered):
            once, again = self.units(_MOST_UNITS), self.units(_MOST_UNITS)
            steady = once is not None and again is not None and _sketch(once) == _sketch(again)
            sketches = comm.all_gather_object(_sketch(once) if steady and once is not None else None)
            if _are_different([None if one is None else (set(one[0]), one[1]) for one in sketches]):
                raise different_data(
                    f"{type(self._sampler).__name__} yields different indices on every rank", comm.size
                )


def _sketch(units: list[Any]) -> tuple[list[int], int]:
    """Return the smallest checksums of the indices, and the largest batch length, the most that `drop_last` omits."""
    batches = any(isinstance(unit, list) for unit in units)
    indices = {repr(one) for unit in units for one in (unit if isinstance(unit, list) else [unit])}
    smallest = sorted(zlib.crc32(index.encode()) for index in indices)[:_SKETCH]
    return smallest, max((len(unit) for unit in units if isinstance(unit, list)), default=0) if batches else 0


def _are_different(sketches: list[tuple[set[int], int] | None]) -> bool:
    """Return True if ranks have different indices; in one order, those that `drop_last` omits at its end may differ."""
    known = [one for one in sketches if one is not None]
    if len(known) < len(sketches):  # one draws from unknown randomness: the first rank's order is used
        return False
    first, slack = known[0]
    for other, _ in known[1:]:
        # in larger sets, only checksums within the range of both sketches are comparable
        end = min(max(one) if len(one) == _SKETCH else 2**32 for one in (first, other))
        missing = {one for one in first ^ other if one <= end}
        if missing and (len(missing) > 2 * slack or not first & other):
            return True
    return False
