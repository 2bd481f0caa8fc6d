"""Machines that have fallen silent: written down by the launcher of each other machine, read there by ranks that wait. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from hasten.runtime import env as environment

_FILE: Final = "silent-machines"


def write(hosts: Collection[str], env: Mapping[str, str]) -> None:
    """Say which hosts do not answer the launcher of this machine, if there is a place to say it."""
    if folder := env.get(environment.MEMORY_FOLDER):
        draft = Path(folder) / f"{_FILE}.draft"
        with suppress(OSError):  # memory may be full: the report then comes later, by the wait alone
            draft.write_text("\n".join(hosts))
            draft.replace(Path(folder) / _FILE)


def read(env: Mapping[str, str]) -> frozenset[str]:
    """The hosts that do not answer the launcher of this machine."""
    folder = env.get(environment.MEMORY_FOLDER)
    try:
        return frozenset((Path(folder) / _FILE).read_text().split("\n")) - {""} if folder else frozenset()
    except OSError:  # all answer
        return frozenset()
