"""Retention: which numbered checkpoints of a run are deleted after a save."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from hasten.checkpoint.base import CheckpointStore, checkpoint_number
from hasten.checkpoint.format.manifest import Manifest
from hasten.config.sections.loop import ProjectConfiguration
from hasten.errors import CheckpointError


def retire_expired(
    store: CheckpointStore,
    project: ProjectConfiguration,
    is_own: Callable[[Manifest], bool],
) -> None:
    """Delete the complete numbered checkpoints that have expired, of those that `is_own` accepts. Ranks: each disk's main."""
    metrics_by_number: dict[int, Mapping[str, float | None]] = {}
    names: dict[int, str] = {}
    for name in store.names():
        number = checkpoint_number(name)
        if number is None:
            continue
        try:
            manifest = store.check(name)
        except CheckpointError:  # not deleted: whatever is left of it may be wanted
            continue
        if is_own(manifest):
            names[number], metrics_by_number[number] = name, manifest.metrics
    for number in expired(metrics_by_number, project):
        store.delete(names[number])


def expired(
    metrics_by_number: Mapping[int, Mapping[str, float | None]],
    project: ProjectConfiguration,
) -> list[int]:
    """Return the numbers of the checkpoints to delete, oldest first. The newest is never deleted; without `total_limit` none is."""
    if project.total_limit is None:
        return []
    numbers = sorted(metrics_by_number)
    retained = set(numbers[-project.total_limit :])
    if project.keep_every:
        retained |= {number for number in numbers if number % project.keep_every == 0}
    retained |= set(best(metrics_by_number, project))
    return [number for number in numbers if number not in retained]


def best(
    metrics_by_number: Mapping[int, Mapping[str, float | None]],
    project: ProjectConfiguration,
) -> list[int]:
    """Return the numbers of the best checkpoints by the metric, best first; of two equal ones the newer is better."""
    if project.keep_best is None or project.best_metric is None:
        return []
    sign = 1.0 if project.best_mode == "min" else -1.0
    ranking = []
    for number, metrics in metrics_by_number.items():
        metric = metrics.get(project.best_metric)
        if metric is not None and not math.isnan(metric):
            ranking.append((sign * metric, -number))
    return [-negative for _, negative in sorted(ranking)[: project.keep_best]]
