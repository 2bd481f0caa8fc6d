"""Metrics for operations, served for Prometheus."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="metrics",
    summary="metrics for operations, served for Prometheus",
    settings={"metrics": "hasten.extensions.metrics.settings:MetricsSettings"},
    run_parts={"metrics": "hasten.extensions.metrics.part:Metrics"},
    run_part_settings={"metrics": "metrics.port"},
)
