"""Link speeds that were measured between the processes of a job: written by `hasten test --links`, read by `hasten plan`. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from hasten.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Measured link speeds: GB/s sent by one process in one direction while all reduce; None for absent links."""

    device: str
    machines: int
    per_machine: int
    node_gb_s: float | None = None
    """Speed to processes of the same machine."""
    network_gb_s: float | None = None
    """Speed to other machines: the machine's bandwidth divided by its processes."""

    def write(self, path: Path | str) -> None:
        """Write the link speeds to a YAML file."""
        Path(path).write_text(yaml.safe_dump(asdict(self), sort_keys=False), "utf-8")


def read_links(path: Path | str) -> Links:
    """Return the link speeds in a file written by `Links.write`.

    Raises: ConfigError for a file that cannot be read, has missing or unknown fields, or holds an invalid speed.
    """
    try:
        # Any: arbitrary file content
        content: Any = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"the link speeds in {path} cannot be read: {str(error).splitlines()[0]}; measure them with `hasten test --links {path}`."
        ) from error
    field_names = {link_field.name for link_field in fields(Links)}
    if isinstance(content, dict):
        link_speeds = []
        for field_name in ("node_gb_s", "network_gb_s"):
            link_speeds.append(content.get(field_name))
    else:
        link_speeds = []
    has_valid_speeds = all(
        speed is None or (isinstance(speed, int | float) and speed > 0)
        for speed in link_speeds
    )
    if (
        not isinstance(content, dict)
        or content.keys() != field_names
        or not has_valid_speeds
    ):
        raise ConfigError(
            f"{path} does not hold link speeds (the fields are {', '.join(sorted(field_names))}, speeds are above 0), so it says nothing about "
            f"this cluster; measure them with `hasten test --links {path}`."
        )
    return Links(**content)
