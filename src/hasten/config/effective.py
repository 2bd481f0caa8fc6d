"""Settings of a command: flags over environment over the named or found file. Loads YAML, which a worker does not need."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hasten.config import files
from hasten.config.handoff import VARIABLE, unpack
from hasten.config.resolve import Resolved, resolve
from hasten.config.source import SettingEntry


def effective(env: Mapping[str, str], config_file: str | None = None, flags: Sequence[SettingEntry] = ()) -> Resolved:
    """Return the effective settings of a command.

    Inside a launched worker, the launcher's settings replace the file.
    """
    path = Path(config_file) if config_file else files.find(env)
    if config_file is None and (handed := env.get(VARIABLE)):
        return resolve(env=env, flags=flags, handed=unpack(handed))
    if path is None:
        return resolve(env=env, flags=flags)
    file = files.read(path)
    return resolve(env=env, flags=flags, file=file.entries, notes=file.notes)
