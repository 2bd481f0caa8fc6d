"""Settings of the metrics server."""

from hasten.config.base import Section, SectionNames, setting, settings


@settings
class MetricsSettings(Section):
    """Metrics for operations: a port for Prometheus. Off unless it is set."""

    section_names = SectionNames(
        argument="metrics", flag_group="metrics for operations"
    )

    port: int | None = setting(
        None,
        "port of GET /metrics, plus the local rank; 0: any free port (default: metrics are not served)",
        minimum=0,
        maximum=65535,
    )
    host: str = setting(
        "127.0.0.1", "address that serves metrics, to everyone who reaches it"
    )
    job: str | None = setting(
        None,
        "value of the label job (default: name of project_dir, else of the script)",
    )
