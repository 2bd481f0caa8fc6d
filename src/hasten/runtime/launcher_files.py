"""Files in which a launcher informs the ranks of its machine: machines that are silent, and ranks that have ended. No torch here."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from hasten.runtime import env as environment

_SILENT: Final = "silent-machines"
_ENDED: Final = "ended-ranks"


def write_silent(hosts: Collection[str], env: Mapping[str, str]) -> None:
    """Write down which hosts do not answer the launcher of this machine."""
    _write(_SILENT, "\n".join(hosts), env)


def silent_machines(env: Mapping[str, str]) -> frozenset[str]:
    """Return the hosts that do not answer the launcher of this machine."""
    return frozenset(_read(_SILENT, env).split("\n")) - {""}


def write_ended(codes: Mapping[int, int], env: Mapping[str, str]) -> None:
    """Write down which ranks of this start of the job have ended, with their exit codes."""
    _write(_ENDED, json.dumps({str(rank): code for rank, code in codes.items()}), env)


def ended_ranks(env: Mapping[str, str]) -> dict[int, int]:
    """Return the exit codes of the ranks of this start of the job that have ended, as far as the launcher knows."""
    found = json.loads(_read(_ENDED, env) or "{}")
    return {int(rank): int(code) for rank, code in found.items()}


def _write(name: str, text: str, env: Mapping[str, str]) -> None:
    if folder := env.get(environment.MEMORY_FOLDER):
        draft = Path(folder) / f"{name}.draft"
        with suppress(OSError):  # memory may be full: the report then comes later, by the wait alone
            draft.write_text(text)
            draft.replace(Path(folder) / name)


def _read(name: str, env: Mapping[str, str]) -> str:
    folder = env.get(environment.MEMORY_FOLDER)
    try:
        return (Path(folder) / name).read_text() if folder else ""
    except OSError:  # nothing was written
        return ""
