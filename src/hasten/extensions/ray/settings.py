"""Settings of runs on a Ray cluster."""

from collections.abc import Mapping
from typing import Any

from hasten.config.base import Section, SectionNames, setting, settings


@settings
class RaySettings(Section):
    """Workers of Ray Train on which `--ray` runs the script; `launch.ray: true` in a file means the same."""

    section_names = SectionNames(word_fields=("enabled",), flag_group="Ray")

    enabled: bool = setting(
        False,
        "run the script on the workers of a Ray cluster, through Ray Train",
        flag="ray",
    )
    workers: str | None = setting(
        None, "elastic number of Ray workers, min:max (instead of num_processes)"
    )
    address: str | None = setting(
        None,
        "address of the Ray cluster (default: RAY_ADDRESS, a cluster on this machine, or a new one)",
    )
    resources: Mapping[str, Any] = setting(
        factory=dict, help="resources of each Ray worker, such as CPU=2,GPU=1"
    )
    storage: str | None = setting(
        None, "folder or URL of the Ray run's state and checkpoints, for all machines"
    )
    name: str | None = setting(
        None, "name of the run in Ray's storage; the same name continues the run"
    )
