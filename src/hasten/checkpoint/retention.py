"""Retention: which numbered checkpoints of a run are deleted after a save."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from hasten.checkpoint.base import CheckpointStore
from hasten.checkpoint.format.manifest import Manifest, checkpoint_number
from hasten.config.sections.loop import ProjectConfiguration
from hasten.errors import CheckpointError


def retire_expired(
    store: CheckpointStore,
    project: ProjectConfiguration,
    is_own: Callable[[Manifest], bool],
) -> None:
    """Delete the complete numbered checkpoints that have expired, of those that `is_own` accepts. Ranks: each disk's main."""
    metrics_by_number: dict[int, Mapping[str, float | None]] = {}
    names_by_number: dict[int, str] = {}
    for checkpoint_name in store.names():
        number = checkpoint_number(checkpoint_name)
        if number is None:
            continue
        try:
            manifest = store.check(checkpoint_name)
        except CheckpointError:  # not deleted: whatever is left of it may be wanted
            continue
        if is_own(manifest):
            names_by_number[number], metrics_by_number[number] = (
                checkpoint_name,
                manifest.metrics,
            )
    for number in find_expired(metrics_by_number, project):
        store.delete(names_by_number[number])


def find_expired(
    metrics_by_number: Mapping[int, Mapping[str, float | None]],
    project: ProjectConfiguration,
) -> list[int]:
    """Return the numbers of the checkpoints to delete, oldest first. The newest is never deleted; without `total_limit` none is."""
    if project.total_limit is None:
        return []
    numbers = sorted(metrics_by_number)
    retained_numbers = set(numbers[-project.total_limit :])
    if project.keep_every:
        retained_numbers |= {
            number for number in numbers if number % project.keep_every == 0
        }
    retained_numbers |= set(best(metrics_by_number, project))
    return [number for number in numbers if number not in retained_numbers]


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
        metric_value = metrics.get(project.best_metric)
        if metric_value is not None and not math.isnan(metric_value):
            ranking.append((sign * metric_value, -number))
    return [-negative for _, negative in sorted(ranking)[: project.keep_best]]
