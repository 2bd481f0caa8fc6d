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

__all__ = ["KNOWN", "AcceleratorEntry", "find_accelerator", "linked", "read"]


def linked(accelerator: AcceleratorEntry, links: Links) -> AcceleratorEntry:
    """Return `accelerator` with measured link speeds, where available; collectives reach these speeds in full."""
    share = accelerator.link_share
    return replace(
        accelerator,
        node_gb_s=links.node_gb_s or accelerator.node_gb_s * share,
        network_gb_s=links.network_gb_s or accelerator.network_gb_s * share,
        link_share=1.0,
    )


def read(
    path: Path | str, known: Mapping[str, AcceleratorEntry] = KNOWN
) -> dict[str, AcceleratorEntry]:
    """Return the known accelerators, and those in a YAML file: `name: {memory_gib: 80, like: h100, ...}`.

    Raises: ConfigError for a file that cannot be read, an unknown field, or a missing field without `like`.
    """
    try:
        content = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"the hardware file {path} cannot be read: {str(error).splitlines()[0]}; give a YAML file."
        ) from error
    if not isinstance(content, dict) or not all(
        isinstance(entry, dict) for entry in content.values()
    ):
        raise ConfigError(
            f"the hardware file {path} is not a mapping of names to entries; write `mycard: {{like: h100}}`."
        )
    entries = dict(known)
    for name, given in content.items():
        entries[str(name)] = _entry(str(name), dict(given), entries, str(path))
    return entries


def _entry(
    name: str, given: dict[str, Any], entries: Mapping[str, AcceleratorEntry], path: str
) -> AcceleratorEntry:
    like = given.pop("like", None)
    names = [spec.name for spec in fields(AcceleratorEntry) if spec.name != "name"]
    for key, value in given.items():
        if key not in names:
            raise ConfigError(
                f"{path}: {name}.{key} is not a field of an accelerator; the fields are {', '.join(names)}."
            )
        if not isinstance(value, int | float) or value < 0:
            raise ConfigError(
                f"{path}: {name}.{key}={value!r} is not a number; give one that is not negative."
            )
    if like is not None:
        return replace(find_accelerator(str(like), entries), name=name, **given)
    try:
        return AcceleratorEntry(name=name, **given)
    except TypeError as error:
        raise ConfigError(
            f"{path}: {name} is incomplete ({error}); add the fields, or `like: h100`."
        ) from error
