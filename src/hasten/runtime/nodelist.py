"""Compressed notations: SLURM host lists like node[001-003,7], task counts like 4(x2),1, and ranks in messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product


def expand_hosts(text: str) -> list[str]:
    """Return the hosts in a SLURM node list, in its order: `a[01-02,5],b` gives a01, a02, a5, b.

    Raises: ValueError if the notation is malformed.
    """
    return [host for term in _split_terms(text) for host in _expand_term(term)]


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


def _split_terms(text: str) -> Iterator[str]:
    """Yield the terms between the commas outside brackets."""
    depth, start = 0, 0
    for position, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise ValueError(f"brackets do not match in {text!r}")
        if letter == "," and depth == 0:
            yield _checked(text[start:position], text)
            start = position + 1
    if depth:
        raise ValueError(f"brackets do not match in {text!r}")
    yield _checked(text[start:], text)


def _checked(term: str, text: str) -> str:
    if not term.strip() or re.search(r"\s", term.strip()):
        raise ValueError(f"{term!r} is not a host name in {text!r}")
    return term.strip()


def _expand_term(term: str) -> Iterator[str]:
    parts: list[list[str]] = []
    for literal, numbers in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", term):
        parts.append([literal] if literal else list(_expand_numbers(numbers)))
    return ("".join(choice) for choice in product(*parts))


def _expand_numbers(text: str) -> Iterator[str]:
    for item in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", item.strip())
        if not found or (found[2] and int(found[2]) < int(found[1])):
            raise ValueError(f"{item!r} is not a number or a range")
        first, last = found[1], found[2] or found[1]
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


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
