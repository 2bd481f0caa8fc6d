"""Compressed notations: SLURM host lists like node[001-003,7], task counts like 4(x2),1, and ranks in messages."""

from __future__ import annotations

import re
from collections.abc import Sequence


def first_host(text: str) -> str:
    """Return the first host in a SLURM node list: `a[01-02,5],b` gives a01.

    Raises: ValueError if the notation is malformed.
    """
    first_term = re.match(r"\s*((?:[^,\[\]\s]|\[\d[\d,-]*\])+)\s*(?:,|$)", text)
    if first_term is None:
        raise ValueError(f"{text!r} does not begin with a host name")
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", first_term[1])


def expand_tasks(text: str) -> list[int]:
    """Return the tasks on each node in SLURM's notation: `4(x2),1` gives 4, 4, 1.

    Raises: ValueError if the notation is malformed.
    """
    counts: list[int] = []
    for term in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", term.strip())
        if not found:
            raise ValueError(f"{term!r} is not a task count")
        counts.extend([int(found[1])] * int(found[2] or 1))
    return counts


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return the ranks as text with consecutive ranks shortened: `rank 3`, `ranks 0, 2-5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    if not ranks:
        return ""
    return f"rank {words}" if len(ranks) == 1 else f"ranks {words}"
