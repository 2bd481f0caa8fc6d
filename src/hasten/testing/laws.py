"""Random law testing: a case is drawn from its seed, checked, and named with the seed when it breaks the law."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from hasten.errors import HastenError

C = TypeVar("C")


class LawBrokenError(HastenError, AssertionError):
    """A case broke its law; the message holds the seed that draws it again."""


@dataclass(slots=True)
class Tally:
    """How the cases of a search ended."""

    seeds: list[int] = field(default_factory=list)
    verdicts: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Lines for people: counts, seeds, and every broken case."""
        seen = ", ".join(f"{count} {verdict}" for verdict, count in sorted(self.verdicts.items()))
        span = f"seeds {self.seeds[0]} to {self.seeds[-1]}" if self.seeds else "no seeds"
        return "\n".join([f"{len(self.seeds)} cases ({span}): {seen}; {len(self.broken)} broken", *self.broken])


@dataclass(frozen=True, slots=True)
class Law(Generic[C]):
    """What is drawn from a seed, and what must hold for it.

    `check` returns a verdict (a word or two, counted) and raises when the law is broken.
    """

    draw: Callable[[int], C]
    check: Callable[[C], str]

    def search(
        self, seeds: Iterable[int], seconds: float | None = None, tell: Callable[[str], object] | None = None
    ) -> Tally:
        """Check one case a seed until the seeds or the time are used up.

        Raises: LawBrokenError at the first broken case, unless there is somebody to `tell`: then it goes on.
        """
        tally = Tally()
        begun = time.monotonic()
        for seed in seeds:
            if seconds is not None and time.monotonic() - begun > seconds:
                break
            case = self.draw(seed)
            tally.seeds.append(seed)
            try:
                verdict = self.check(case)
            except Exception as error:  # whatever a case raises is reported with what draws it again
                verdict = f"broken: {case}\n{type(error).__name__}: {error}"
                if tell is None:
                    raise LawBrokenError(f"seed {seed}: {verdict}") from error
                tally.broken.append(f"seed {seed}: {verdict}")
            else:
                tally.verdicts[verdict] += 1
            if tell is not None:
                tell(f"seed {seed}: {verdict}\n")
        return tally
