"""Settings that the schema accepts but this version does not support: a table, and the check that refuses them at start.

Remove a row when its feature is added. `tests/arch/test_settings_act.py` checks that every setting is either read by the library
or refused by a row here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from hasten.config.base import Absent, default_of
from hasten.config.schema import BY_PATH, FIELDS, SECTIONS
from hasten.config.source import Path, SettingEntry, shown
from hasten.errors import ConfigError

_CORE: Final[tuple[Absent, ...]] = (
    Absent(
        "parallelism.tp_handler.enable_async_tp",
        "this option of tensor parallelism",
        "leave it out to split layers without it",
    ),
    Absent(
        "parallelism.cp_handler.cp_comm_strategy",
        "attention around a ring of ranks",
        "use allgather, or ulysses where cp_size divides the heads",
        values=("ring", "alltoall"),
    ),
    Absent(
        "parallelism.sp_handler",
        "choosing lengths or attention kernels for sequence parallelism",
        "sequences may have any length that sp_size divides, and the kernel is that of scaled_dot_product_attention; leave it out",
    ),
    Absent(
        "fp8.te.interval",
        "an interval between scaling factors",
        "Transformer Engine computes them in every step",
    ),
    Absent(
        "gradient_accumulation.adjust_scheduler",
        "counting micro-steps in schedulers",
        "schedulers step once per update; leave it out",
    ),
)
ABSENT: Final[tuple[Absent, ...]] = (
    *_CORE,
    *(
        replace(row, name=".".join((*path, row.name)).rstrip("."))
        for path, section in SECTIONS.items()
        for row in section.absent
    ),
)

_PATHS: Final = frozenset(
    info.path
    for row in ABSENT
    for path in (row.path,)
    for info in FIELDS
    if info.path[: len(path)] == path
)
"""Settings of which some values are refused."""


def is_absent(path: Path) -> bool:
    """Return whether this version supports no value of this setting but its default."""
    return any(
        path[: len(row.path)] == row.path and path[-1] not in row.but and not row.values
        for row in ABSENT
    )


def refused(entries: Mapping[Path, SettingEntry]) -> list[ConfigError]:
    """Return errors for settings that this version does not support; only those about strategy and launch, if any.

    Variables of other tools are ignored if they only set options of a strategy that was not chosen.
    """
    strategy_and_launch_errors = list(
        _complaints(
            {
                path: entry
                for path, entry in entries.items()
                if path[0] in ("strategy", "launch")
            }
        )
    )
    if strategy_and_launch_errors:
        return strategy_and_launch_errors
    hasten_entries = {
        p: e
        for p, e in entries.items()
        if e.source.kind != "environment" or e.source.detail.startswith("HASTEN_")
    }
    return list(_complaints(hasten_entries))


def check(entries: Mapping[Path, SettingEntry]) -> None:
    """Raise unless this version supports every setting.

    Raises: ConfigError for the first unsupported setting.
    """
    if not _PATHS.isdisjoint(entries) and (complaints := refused(entries)):
        raise complaints[0]


def _complaints(entries: Mapping[Path, SettingEntry]) -> Iterator[ConfigError]:
    order = {info.path: number for number, info in enumerate(FIELDS)}
    for path in sorted(entries, key=order.__getitem__):
        for row in ABSENT:
            if refuses(row, path, entries[path].value):
                setting_text = f"{entries[path].name}={shown(entries[path].value)} ({entries[path].source})"
                yield ConfigError(
                    f"{setting_text} cannot be honoured, because {row.what} is not in this version; {row.instead}."
                )
                break


def refuses(row: Absent, path: Path, value: Any) -> bool:  # Any: a value of the setting
    """Return whether a row refuses this value of the setting at `path`."""
    if path[: len(row.path)] != row.path or path[-1] in row.but:
        return False
    info = BY_PATH[path]
    return (
        value in row.values
        if row.values
        else bool(value != default_of(info.owner, path[-1]))
    )
