"""The settings that hold for a command: flags over environment over the named or found file."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hasten.config import files, handoff
from hasten.config.resolve import Resolved, resolve
from hasten.config.source import Entry


def effective(env: Mapping[str, str], config_file: str | None = None, flags: Sequence[Entry] = ()) -> Resolved:
    """Return the settings that hold for a command.

    Inside a launched worker, what the launcher handed over stands for the file.
    """
    path = Path(config_file) if config_file else files.find(env)
    if config_file is None and (handed := env.get(handoff.VARIABLE)):
        return resolve(env=env, flags=flags, handed=handoff.unpack(handed))
    if path is None:
        return resolve(env=env, flags=flags)
    file = files.read(path)
    return resolve(env=env, flags=flags, file=file.entries, notes=file.notes)
