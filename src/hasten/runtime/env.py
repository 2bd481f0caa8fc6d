"""The environment: the only file that touches os.environ, and the names of what hasten reads there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir
from types import MappingProxyType
from typing import Final

from hasten.errors import ConfigError

CONFIG: Final = "HASTEN_CONFIG"
DEBUG: Final = "HASTEN_DEBUG"
DEBUG_ALIAS: Final = "ACCELERATE_DEBUG_MODE"
HOME: Final = "HASTEN_HOME"
LOG_LEVEL: Final = "HASTEN_LOG_LEVEL"
MEMORY_FOLDER: Final = "HASTEN_MEMORY_FOLDER"
"""Set by the launcher: a folder in memory that outlives the processes it starts, and ends with it."""

_TRUE: Final = frozenset({"1", "true", "yes", "on", "y", "t"})
_FALSE: Final = frozenset({"0", "false", "no", "off", "n", "f", ""})


def snapshot() -> Mapping[str, str]:
    """Return this process's environment as it is now; later changes do not show."""
    return MappingProxyType(dict(os.environ))


def config(env: Mapping[str, str]) -> str | None:
    """Return the configuration handed over by the launcher (HASTEN_CONFIG), undecoded."""
    return env.get(CONFIG) or None


def debug(env: Mapping[str, str]) -> bool:
    """Return whether debug mode is on: HASTEN_DEBUG, else ACCELERATE_DEBUG_MODE."""
    return flag(env, DEBUG if DEBUG in env else DEBUG_ALIAS)


def home(env: Mapping[str, str]) -> Path:
    """Return the folder for hasten's own files: HASTEN_HOME, else `hasten` in the user's cache folder."""
    if given := env.get(HOME):
        return Path(given)
    cache = env.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path(env.get("HOME", "~")).expanduser() / ".cache") / "hasten"


def runtime_folder(env: Mapping[str, str]) -> Path:
    """The user's folder for sockets: in XDG_RUNTIME_DIR, else one with the user's number in the folder for temporary files."""
    given = env.get("XDG_RUNTIME_DIR")
    return Path(given) / "hasten" if given else Path(gettempdir()) / f"hasten-{os.geteuid()}"


def log_level(env: Mapping[str, str]) -> str | None:
    """Return the level of hasten's loggers (HASTEN_LOG_LEVEL), in capitals, or None to leave it to logging."""
    levels = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    value = env.get(LOG_LEVEL, "").strip().upper()
    if value and value not in levels:
        raise ConfigError(
            f"{LOG_LEVEL}={env[LOG_LEVEL]!r} is not a log level, so it is unclear what to show; "
            f"set it to one of {', '.join(levels)}."
        )
    return value or None


def flag(env: Mapping[str, str], name: str, default: bool = False) -> bool:
    """Return the yes-or-no variable `name`; `default` where it is not set.

    Raises: ConfigError for a value that says neither.
    """
    value = env.get(name)
    if value is None:
        return default
    word = value.strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise ConfigError(f"{name}={value!r} is neither yes nor no, so it would be guessed; set {name} to 1 or 0.")


def put_default(name: str, value: str) -> bool:
    """Set `name` unless it is set, for a library below that reads nothing but the environment; whether it was done."""
    if name in os.environ:
        return False
    os.environ[name] = value
    return True


@contextmanager
def restored() -> Iterator[None]:
    """Put the environment back as it was at the start when the block ends."""
    before = dict(os.environ)
    try:
        yield
    finally:
        replace(before)


def replace(env: Mapping[str, str]) -> None:
    """Make this process's environment equal to `env`: for worker processes that serve one job after another."""
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    for name, value in env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
