"""Draws from the samplers of all ranks, to find those that yield the indices of their own rank only."""

from __future__ import annotations

import operator
import zlib
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any, Final

from hasten.comm.base import Comm
from hasten.data.evidence import different_data
from hasten.data.memory import Memory
from hasten.data.own_rng import OwnRng, RandomStates, States, decode_states

# Any in this file: samplers and units are the user's own.
NUM_UNITS: Final = 64
_MOST_UNITS: Final = 1_000_000


def plain_unit(unit: Any) -> Any:
    """A unit as numbers and texts. Raises: TypeError for any other."""
    if isinstance(unit, str):
        return str(unit)
    if isinstance(unit, list | tuple):
        return [plain_unit(part) for part in unit]
    return operator.index(unit)


class Trial:
    """Draws an epoch of this rank's own sampler from the first rank's random states; what the sampler holds is put back."""

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
        """The first units; None where they cannot be drawn or are no plain numbers, and so cannot be compared."""
        put_back = self._keep()
        rng = OwnRng(self._seed, self._process)
        rng.place(self._states)
        try:
            with self._process.kept(), rng.entered():
                Memory(self._sampler, attributes=False).restore(self._generators)
                if hasattr(self._sampler, "set_epoch"):
                    self._sampler.set_epoch(self._epoch)
                return [plain_unit(unit) for unit in islice(iter(self._sampler), most)]
        except (
            Exception
        ):  # the user's sampler, or generators of another making: raised where the loop draws, or of no use
            return None
        finally:
            put_back()

    def compare(self, told: list[list[Any] | None], comm: Comm) -> None:
        """Raise on every rank when the samplers of ranks yield different indices; `told` holds the first ones of each.

        Ranks: every rank.
        """
        if any(one is None or one != told[0] for one in told) and all(one is not None for one in told):
            once, again = self.units(_MOST_UNITS), self.units(_MOST_UNITS)
            mine = None if once is None or again is None or _sum(once) != _sum(again) else [len(once), _sum(once)]
            sums: list[list[int] | None] = comm.all_gather_object(mine)
            if _are_different(sums, told):
                raise different_data(f"{type(self._sampler).__name__} yields other indices on every rank", comm.size)


def _sum(units: list[Any]) -> int:
    """A checksum of the units in any order."""
    return zlib.crc32(repr(sorted(Counter(map(repr, units)).items())).encode())


def _are_different(sums: list[list[int] | None], told: list[Any]) -> bool:
    if any(
        one is None for one in sums
    ):  # one that draws at random from nothing we know: the first rank's order is used
        return False
    if any(one is not None and one[0] == _MOST_UNITS for one in sums):  # too many to compare: parts have none in common
        first = [{repr(unit) for unit in units} for units in told]
        return sum(map(len, first)) == len(set().union(*first))
    return any(one != sums[0] for one in sums)
