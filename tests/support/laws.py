"""Property testing: a case is drawn from its seed, checked, and reported with the seed if it breaks the law."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from hasten.errors import HastenError

C = TypeVar("C")


class LawBrokenError(HastenError, AssertionError):
    """Raised for a case that breaks its law; the message contains the seed that reproduces it."""


@dataclass(slots=True)
class Tally:
    """Results of the cases of a search."""

    seeds: list[int] = field(default_factory=list)
    verdicts: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Return counts, seeds, and every broken case as readable lines."""
        verdict_counts = ", ".join(
            f"{count} {verdict}" for verdict, count in sorted(self.verdicts.items())
        )
        span = (
            f"seeds {self.seeds[0]} to {self.seeds[-1]}" if self.seeds else "no seeds"
        )
        return "\n".join(
            [
                f"{len(self.seeds)} cases ({span}): {verdict_counts}; {len(self.broken)} broken",
                *self.broken,
            ]
        )


@dataclass(frozen=True, slots=True)
class Law(Generic[C]):
    """A law: how to draw a case from a seed, and how to check it.

    `check` returns a verdict (a word or two, counted) and raises if the law is broken.
    """

    draw: Callable[[int], C]
    check: Callable[[C], str]

    def search(
        self,
        seeds: Iterable[int],
        seconds: float | None = None,
        tell: Callable[[str], object] | None = None,
    ) -> Tally:
        """Check one case per seed until the seeds or the time are used up.

        Raises: LawBrokenError at the first broken case, unless `tell` is given: then it is reported and the search continues.
        """
        tally = Tally()
        start_time = time.monotonic()
        for seed in seeds:
            if seconds is not None and time.monotonic() - start_time > seconds:
                break
            case = self.draw(seed)
            tally.seeds.append(seed)
            try:
                verdict = self.check(case)
            # any error is reported with the seed that reproduces it
            except Exception as error:
                verdict = f"broken: {case}\n{type(error).__name__}: {error}"
                if tell is None:
                    raise LawBrokenError(f"seed {seed}: {verdict}") from error
                tally.broken.append(f"seed {seed}: {verdict}")
            else:
                tally.verdicts[verdict] += 1
            if tell is not None:
                tell(f"seed {seed}: {verdict}\n")
        return tally
