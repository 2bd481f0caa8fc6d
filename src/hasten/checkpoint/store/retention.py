"""Numbered checkpoints: their names, and the pure choice of those to delete."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

_NUMBERED = re.compile(r"checkpoint_(\d+)")


def numbered(number: int) -> str:
    """Return the name of an automatically numbered checkpoint."""
    return f"checkpoint_{number}"


def number_of(name: str) -> int | None:
    """Return the number in an automatic name; None for other names."""
    match = _NUMBERED.fullmatch(name)
    return int(match[1]) if match else None


def next_number(names: Iterable[str], at_least: int) -> int:
    """Return a number above all numbers in use, and not below `at_least`."""
    number = at_least
    for name in names:
        used_number = number_of(name)
        if used_number is not None:
            number = max(number, used_number + 1)
    return number


@dataclass(frozen=True, slots=True)
class CommittedCheckpoint:
    """Name, number and metrics of a committed checkpoint."""

    name: str
    number: int
    metrics: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Retention:
    """Retention rules: newest `total_limit`, `keep_best` by a metric, every `keep_every`-th; None = no such rule."""

    total_limit: int | None = None
    keep_best: int | None = None
    best_metric: str | None = None
    best_mode: Literal["min", "max"] = "min"
    keep_every: int | None = None


def expired(checkpoints: Sequence[CommittedCheckpoint], policy: Retention) -> list[str]:
    """Return the names to delete, oldest first. The newest is never deleted; without `total_limit` none is."""
    if policy.total_limit is None:
        return []
    ordered = sorted(checkpoints, key=lambda item: item.number)
    keep = {item.name for item in ordered[-max(policy.total_limit, 1) :]}
    if policy.keep_every:
        keep |= {item.name for item in ordered if item.number % policy.keep_every == 0}
    keep |= set(best(ordered, policy))
    return [item.name for item in ordered if item.name not in keep]


def best(checkpoints: Sequence[CommittedCheckpoint], policy: Retention) -> list[str]:
    """Return the names of the best checkpoints by the metric, best first; of two equal ones the newer is better."""
    if policy.keep_best is None or policy.best_metric is None:
        return []
    sign = 1.0 if policy.best_mode == "min" else -1.0
    scored = []
    for item in checkpoints:
        value = item.metrics.get(policy.best_metric)
        if value is not None and not math.isnan(value):
            scored.append((sign * value, -item.number, item.name))
    return [name for _, _, name in sorted(scored)[: policy.keep_best]]
