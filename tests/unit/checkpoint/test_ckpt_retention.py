"""Retention never takes the newest, and keeps exactly what each rule asks for."""

from __future__ import annotations

import itertools

from hasten.checkpoint.base import next_number, number_of, numbered
from hasten.checkpoint.save import CommittedCheckpoint, Retention, best, expired


def made(n: int, start: int = 0) -> list[CommittedCheckpoint]:
    return [
        CommittedCheckpoint(numbered(i), i, {"loss": float((i * 7) % 5)})
        for i in range(start, start + n)
    ]


def test_laws_over_all_small_policies() -> None:
    limits, bests, everys = (None, 1, 2, 5), (None, 1, 3), (None, 2, 4)
    for n, limit, k, every in itertools.product(range(12), limits, bests, everys):
        policy = Retention(limit, k, "loss", "min", every)
        there = made(n)
        gone = expired(list(reversed(there)), policy)
        left = [item for item in there if item.name not in gone]
        if limit is None:
            assert not gone
            continue
        assert there[-limit:] == left[-min(limit, n) :] if n else not gone
        assert set(best(there, policy)) <= {item.name for item in left}
        assert (
            all(item.number % every for item in there if item.name in gone)
            if every
            else True
        )
        assert len(left) <= limit + (k or 0) + (n // every + 1 if every else 0)
        assert not expired(left, policy), "a second look deletes nothing more"


def test_best_prefers_the_newer_of_equals_and_skips_nan() -> None:
    there = [
        CommittedCheckpoint("a", 0, {"x": 1.0}),
        CommittedCheckpoint("b", 1, {"x": 1.0}),
        CommittedCheckpoint("c", 2, {"x": float("nan")}),
        CommittedCheckpoint("d", 3),
    ]
    assert best(there, Retention(1, 1, "x")) == ["b"]
    assert best(
        [*there, CommittedCheckpoint("e", 4, {"x": 3.0})], Retention(1, 1, "x", "max")
    ) == ["e"]


def test_numbers_never_come_twice() -> None:
    assert next_number([], 0) == 0
    assert (
        next_number(["checkpoint_3", "checkpoint_11", "other_99", "checkpoint_x"], 2)
        == 12
    )
    assert next_number(["checkpoint_3"], 20) == 20
    assert [
        number_of(n) for n in ("checkpoint_7", "checkpoint_7x", "my_checkpoint_7")
    ] == [7, None, None]
