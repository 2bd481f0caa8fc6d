"""Declaration of the extension: metrics for operations, served for Prometheus."""

from hasten.extension import Extension

extension = Extension(
    name="metrics",
    summary="metrics for operations, served for Prometheus",
    run_parts={"metrics": "hasten.accelerator.operations:Metrics"},
    run_part_settings={"metrics": "metrics.port"},
)
