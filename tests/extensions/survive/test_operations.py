"""Lost and joined replicas in the metrics and in the run's events."""

from __future__ import annotations

import time

from hasten.config.resolve import resolve
from hasten.extensions.metrics.part import number_of
from hasten.extensions.metrics.reading import RankReading
from hasten.extensions.survive.report import SurvivalReport
from tests.support.exposition import metrics_text


def test_the_metrics_hold_present_lost_and_joined_replicas_and_returned_samples() -> (
    None
):
    reading = RankReading(
        numbers={
            "hasten_replicas": 3,
            "hasten_replicas_lost_total": 2,
            "hasten_replicas_joined_total": 1,
            "hasten_samples_returned_total": 24,
            "hasten_replicas_waiting_seconds": 0.5,
        }
    )
    text = metrics_text(reading, {})
    for line in (
        "hasten_replicas 3.0",
        "hasten_replicas_lost_total 2.0",
        "hasten_replicas_joined_total 1.0",
        "hasten_samples_returned_total 24.0",
        "hasten_replicas_waiting_seconds 0.5",
    ):
        assert f"\n{line}" in text, text


def test_runs_that_cannot_lose_replicas_have_no_such_samples() -> None:
    unknown = RankReading(numbers={"hasten_replicas": None})
    assert "hasten_replicas" not in metrics_text(unknown, {})


def test_a_wait_for_others_is_measured_while_it_lasts() -> None:
    report = SurvivalReport()
    assert report.waiting_s == 0.0
    report.waiting_since = time.monotonic() - 3.0
    assert 3.0 <= report.waiting_s < 60.0


def test_replicas_are_told_apart_by_their_number() -> None:
    third = resolve(code={"survive": {"replica": "3"}}, env={}).config
    assert number_of(third, 0, 1) == 3
    assert [number_of(third, rank, 2) for rank in range(2)] == [6, 7]
    assert (
        number_of(resolve(code={"survive": {"replica": "left"}}, env={}).config, 0, 1)
        == 0
    )
    assert number_of(resolve(code={}, env={}).config, 5, 8) == 5
