"""Transfer of the resolved settings, with their sources, from the launcher to its workers in the variable HASTEN_CONFIG."""

import json
from collections.abc import Mapping
from typing import Any, Final

from hasten.config.decode import encode
from hasten.config.schema import BY_PATH
from hasten.config.source import (
    PRECEDENCE,
    Path,
    SettingEntry,
    SettingSource,
    dotted_name,
)
from hasten.errors import ConfigError

VARIABLE: Final = "HASTEN_CONFIG"
_VERSION: Final = 1


def pack_settings(entries: Mapping[Path, SettingEntry]) -> str:
    """Return settings that differ from their default, each with its source, as one line of JSON."""
    rows = [
        [
            dotted_name(setting_path),
            encode(setting_entry.value),
            setting_entry.source.kind,
            setting_entry.source.detail,
        ]
        for setting_path, setting_entry in entries.items()
        if not BY_PATH[setting_path].meta.code_only
        and _is_serialisable(setting_entry.value)
    ]
    return json.dumps({"version": _VERSION, "settings": rows}, separators=(",", ":"))


def unpack_settings(text: str) -> tuple[SettingEntry, ...]:
    """Return the entries passed on by a launcher.

    Raises: ConfigError if the string was not written by `pack` of this version.
    """
    try:
        data: Any = json.loads(text)
        assert data["version"] == _VERSION, data["version"]
        return tuple(_unpacked_entry(*row) for row in data["settings"])
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        AssertionError,
        RecursionError,
    ) as error:
        raise ConfigError(
            f"{VARIABLE} holds no settings of this version ({type(error).__name__}: {error}), so the worker does not "
            "know what was asked for; start it with `hasten launch` of the same version, or unset the variable."
        ) from error


def _unpacked_entry(name: str, value: Any, kind: str, detail: str) -> SettingEntry:
    return SettingEntry(
        tuple(name.split(".")),
        value,
        SettingSource(PRECEDENCE[PRECEDENCE.index(kind)], detail),
    )


def _is_serialisable(value: Any) -> bool:
    """Return whether a value is serialisable: functions and objects are not."""
    try:
        json.dumps(encode(value))
    except TypeError:
        return False
    return True
