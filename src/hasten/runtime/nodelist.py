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
    task_counts: list[int] = []
    for node_term in text.split(","):
        term_match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", node_term.strip())
        if not term_match:
            raise ValueError(f"{node_term!r} is not a task count")
        task_counts.extend([int(term_match[1])] * int(term_match[2] or 1))
    return task_counts


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return the ranks as text with consecutive ranks shortened: `rank 3`, `ranks 0, 2-5`."""
    rank_runs: list[list[int]] = []
    for rank in sorted(ranks):
        if rank_runs and rank == rank_runs[-1][1] + 1:
            rank_runs[-1][1] = rank
        else:
            rank_runs.append([rank, rank])
    run_texts = ", ".join(
        str(first_rank) if first_rank == last_rank else f"{first_rank}-{last_rank}"
        for first_rank, last_rank in rank_runs
    )
    if not ranks:
        return ""
    if len(ranks) == 1:
        return f"rank {run_texts}"
    return f"ranks {run_texts}"
