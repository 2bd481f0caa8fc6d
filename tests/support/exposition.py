"""Prometheus's text of one reading."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.exposition import generate_latest
from prometheus_client.registry import CollectorRegistry

from hasten.extensions.metrics.catalogue import RankCollector
from hasten.extensions.metrics.reading import RankReading


def metrics_text(reading: RankReading, labels: Mapping[str, str]) -> str:
    """Return the metrics of a reading in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RankCollector(lambda: reading, labels))
    return generate_latest(registry).decode()
