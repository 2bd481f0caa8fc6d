"""Settings that the schema accepts but this version does not support: a table, and the check that refuses them at start.

Remove a row when its feature is added. `tests/arch/test_settings_act.py` checks that every setting is either read by the library
or refused by a row here.
"""

from collections.abc import Mapping
from typing import Final

from hasten.config.base import Absent, default_of
from hasten.config.schema import BY_PATH, SECTIONS
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
ABSENT: Final[tuple[tuple[Path, Absent], ...]] = (
    *((tuple(row.name.split(".")), row) for row in _CORE),
    *(
        ((*path, *row.name.split(".")) if row.name else path, row)
        for path, section in SECTIONS.items()
        for row in section.absent
    ),
)
"""The rows, each with the path of its setting or section."""


def check(entries: Mapping[Path, SettingEntry]) -> None:
    """Raise unless this version supports every setting.

    Variables of other tools are ignored: they may set options of a strategy that was not chosen.
    Raises: ConfigError for the first unsupported setting.
    """
    for row_path, row in ABSENT:
        for setting_path, setting_entry in entries.items():
            if setting_path[: len(row_path)] != row_path or not refuses(
                row, setting_entry
            ):
                continue
            source = setting_entry.source
            if source.kind == "environment" and not source.detail.startswith("HASTEN_"):
                continue
            raise ConfigError(
                f"{setting_entry.name}={shown(setting_entry.value)} ({source}) cannot be honoured, because {row.what} is not in this version; {row.instead}."
            )


def refuses(row: Absent, setting_entry: SettingEntry) -> bool:
    """Return whether a row refuses the value of a setting below its path."""
    if setting_entry.path[-1] in row.but:
        return False
    if row.values:
        return setting_entry.value in row.values
    owner = BY_PATH[setting_entry.path].owner
    return bool(setting_entry.value != default_of(owner, setting_entry.path[-1]))
