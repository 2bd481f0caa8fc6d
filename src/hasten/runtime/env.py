"""Environment variables: the only file that accesses os.environ, and the names of hasten's variables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir
from types import MappingProxyType
from typing import Final

from hasten.errors import ConfigError

ASSIGNED_DEVICE: Final = "ACCELERATE_TORCH_DEVICE"
CONFIG: Final = "HASTEN_CONFIG"
DEBUG: Final = "HASTEN_DEBUG"
DEBUG_ALIAS: Final = "ACCELERATE_DEBUG_MODE"
HOME: Final = "HASTEN_HOME"
LOG_LEVEL: Final = "HASTEN_LOG_LEVEL"
MEMORY_FOLDER: Final = "HASTEN_MEMORY_FOLDER"
"""Set by the launcher: an in-memory folder that outlives the worker processes, and is removed with the launcher."""

_TRUE: Final = frozenset({"1", "true", "yes", "on", "y", "t"})
_FALSE: Final = frozenset({"0", "false", "no", "off", "n", "f", ""})


def snapshot() -> Mapping[str, str]:
    """Return a copy of this process's environment; later changes are not reflected."""
    return MappingProxyType(dict(os.environ))


def debug(env: Mapping[str, str]) -> bool:
    """Return whether debug mode is on: HASTEN_DEBUG, else ACCELERATE_DEBUG_MODE."""
    return read_flag(env, DEBUG if DEBUG in env else DEBUG_ALIAS)


def assigned_device(env: Mapping[str, str]) -> str | None:
    """Return the device that Ray Train has assigned to this worker (ACCELERATE_TORCH_DEVICE), such as cuda:1; None without it."""
    return env.get(ASSIGNED_DEVICE) or None


def home(env: Mapping[str, str]) -> Path:
    """Return the folder for hasten's files: HASTEN_HOME, else `hasten` in the user's cache folder."""
    if hasten_home := env.get(HOME):
        return Path(hasten_home)
    cache_folder = env.get("XDG_CACHE_HOME")
    return (
        Path(cache_folder)
        if cache_folder
        else Path(env.get("HOME", "~")).expanduser() / ".cache"
    ) / "hasten"


def runtime_folder(env: Mapping[str, str]) -> Path:
    """Return the user's folder for sockets: in XDG_RUNTIME_DIR, else in the temporary folder, named by the user id."""
    xdg_folder = env.get("XDG_RUNTIME_DIR")
    if xdg_folder:
        return Path(xdg_folder) / "hasten"
    return Path(gettempdir()) / f"hasten-{os.geteuid()}"


def log_level(env: Mapping[str, str]) -> str | None:
    """Return the level of hasten's loggers (HASTEN_LOG_LEVEL) in upper case, or None to inherit it from logging."""
    level_names = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    level_name = env.get(LOG_LEVEL, "").strip().upper()
    if level_name and level_name not in level_names:
        raise ConfigError(
            f"{LOG_LEVEL}={env[LOG_LEVEL]!r} is not a log level, so it is unclear what to show; "
            f"set it to one of {', '.join(level_names)}."
        )
    return level_name or None


def read_flag(env: Mapping[str, str], name: str, default: bool = False) -> bool:
    """Return the boolean variable `name`; `default` if it is not set.

    Raises: ConfigError for a value that is not a boolean.
    """
    flag_text = env.get(name)
    if flag_text is None:
        return default
    flag_word = flag_text.strip().lower()
    if flag_word in _TRUE or flag_word in _FALSE:
        return flag_word in _TRUE
    raise ConfigError(
        f"{name}={flag_text!r} is neither yes nor no, so it would be guessed; set {name} to 1 or 0."
    )


def put_default(name: str, value: str) -> bool:
    """Set `name` unless it is set, for libraries that are only configured by variables; return whether it was set."""
    if name in os.environ:
        return False
    os.environ[name] = value
    return True


@contextmanager
def restored_environment() -> Iterator[None]:
    """Restore the environment at the end of the block."""
    saved_environment = dict(os.environ)
    try:
        yield
    finally:
        replace_environment(saved_environment)


def replace_environment(env: Mapping[str, str]) -> None:
    """Replace this process's environment with `env`: for worker processes that run one job after another."""
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    for name, value in env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
