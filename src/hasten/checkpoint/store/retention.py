"""Retention policy: a pure function that selects the checkpoints to delete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


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
    scored = [
        (sign * value, -item.number, item.name)
        for item in checkpoints
        if (value := item.metrics.get(policy.best_metric)) is not None and value == value
    ]
    return [name for _, _, name in sorted(scored)[: policy.keep_best]]
