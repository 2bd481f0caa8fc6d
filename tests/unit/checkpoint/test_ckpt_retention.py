"""Retention never takes the newest, and keeps exactly what each rule asks for."""

from __future__ import annotations

import itertools

from hasten import ProjectConfiguration
from hasten.checkpoint.format.manifest import checkpoint_number, next_number
from hasten.checkpoint.retention import best, find_expired


def numbered_metrics(n: int) -> dict[int, dict[str, float | None]]:
    return {i: {"loss": float((i * 7) % 5)} for i in range(n)}


def test_laws_over_all_small_policies() -> None:
    limits, bests, everys = (None, 1, 2, 5), (None, 1, 3), (None, 2, 4)
    for n, limit, k, every in itertools.product(range(12), limits, bests, everys):
        policy = ProjectConfiguration(
            total_limit=limit, keep_best=k, best_metric="loss", keep_every=every
        )
        saved_metrics = numbered_metrics(n)
        expired = find_expired(dict(reversed(saved_metrics.items())), policy)
        left = {
            number: saved_metrics[number]
            for number in saved_metrics
            if number not in expired
        }
        if limit is None:
            assert not expired
            continue
        assert (
            list(saved_metrics)[-limit:] == list(left)[-min(limit, n) :]
            if n
            else not expired
        )
        assert set(best(saved_metrics, policy)) <= left.keys()
        assert all(number % every for number in expired) if every else True
        assert len(left) <= limit + (k or 0) + (n // every + 1 if every else 0)
        assert not find_expired(left, policy), "a second look deletes nothing more"


def test_best_prefers_the_newer_of_equals_and_skips_nan() -> None:
    saved_metrics: dict[int, dict[str, float | None]] = {
        0: {"x": 1.0},
        1: {"x": 1.0},
        2: {"x": float("nan")},
        3: {},
    }
    lowest = ProjectConfiguration(total_limit=1, keep_best=1, best_metric="x")
    assert best(saved_metrics, lowest) == [1]
    highest = ProjectConfiguration(
        total_limit=1, keep_best=1, best_metric="x", best_mode="max"
    )
    assert best({**saved_metrics, 4: {"x": 3.0}}, highest) == [4]


def test_numbers_never_come_twice() -> None:
    assert next_number([], 0) == 0
    assert (
        next_number(["checkpoint_3", "checkpoint_11", "other_99", "checkpoint_x"], 2)
        == 12
    )
    assert next_number(["checkpoint_3"], 20) == 20
    assert [
        checkpoint_number(n)
        for n in ("checkpoint_7", "checkpoint_7x", "my_checkpoint_7")
    ] == [7, None, None]
