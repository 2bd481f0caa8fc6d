"""Accelerators for which a job can be planned: the table, measured links, and user entries from a YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from hasten.errors import ConfigError
from hasten.launch.links import Links
from hasten.runtime.hardware import KNOWN, AcceleratorEntry, find_accelerator

__all__ = [
    "KNOWN",
    "AcceleratorEntry",
    "find_accelerator",
    "read_entries",
    "with_links",
]


def with_links(gpu_entry: AcceleratorEntry, measured_links: Links) -> AcceleratorEntry:
    """Return `accelerator` with measured link speeds, where available; collectives reach these speeds in full."""
    link_share = gpu_entry.link_share
    return replace(
        gpu_entry,
        node_gb_s=measured_links.node_gb_s or gpu_entry.node_gb_s * link_share,
        network_gb_s=measured_links.network_gb_s or gpu_entry.network_gb_s * link_share,
        link_share=1.0,
    )


def read_entries(
    path: Path | str, table_entries: Mapping[str, AcceleratorEntry] = KNOWN
) -> dict[str, AcceleratorEntry]:
    """Return the known accelerators, and those in a YAML file: `name: {memory_gib: 80, like: h100, ...}`.

    Raises: ConfigError for a file that cannot be read, an unknown field, or a missing field without `like`.
    """
    try:
        file_entries = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"the hardware file {path} cannot be read: {str(error).splitlines()[0]}; give a YAML file."
        ) from error
    if not isinstance(file_entries, dict) or not all(
        isinstance(fields_of_entry, dict) for fields_of_entry in file_entries.values()
    ):
        raise ConfigError(
            f"the hardware file {path} is not a mapping of names to entries; write `mycard: {{like: h100}}`."
        )
    entries = dict(table_entries)
    for name, fields_of_entry in file_entries.items():
        entries[str(name)] = _make_entry(
            str(name), dict(fields_of_entry), entries, str(path)
        )
    return entries


def _make_entry(
    name: str,
    field_values: dict[str, Any],
    table_entries: Mapping[str, AcceleratorEntry],
    path: str,
) -> AcceleratorEntry:
    similar_name = field_values.pop("like", None)
    field_names = []
    for field_spec in fields(AcceleratorEntry):
        if field_spec.name != "name":
            field_names.append(field_spec.name)
    for field_name, field_value in field_values.items():
        if field_name not in field_names:
            raise ConfigError(
                f"{path}: {name}.{field_name} is not a field of an accelerator; the fields are {', '.join(field_names)}."
            )
        if not isinstance(field_value, int | float) or field_value < 0:
            raise ConfigError(
                f"{path}: {name}.{field_name}={field_value!r} is not a number; give one that is not negative."
            )
    if similar_name is not None:
        return replace(
            find_accelerator(str(similar_name), table_entries),
            name=name,
            **field_values,
        )
    try:
        return AcceleratorEntry(name=name, **field_values)
    except TypeError as error:
        raise ConfigError(
            f"{path}: {name} is incomplete ({error}); add the fields, or `like: h100`."
        ) from error
