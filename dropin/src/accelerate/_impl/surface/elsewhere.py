"""Names that faces show although another module defines them: `elsewhere.txt`, read when a face lacks a name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

_TABLE = Path(__file__).with_suffix(".txt")
_MODULES = "-"
"""The home of names that are modules themselves, written NAME=MODULE."""


@cache
def _homes() -> dict[str, dict[str, str]]:
    """The module of each name, by face; a line is a face, a home and the names it has there."""
    found: dict[str, dict[str, str]] = {}
    for line in _TABLE.read_text().splitlines():
        face, home, *names = line.split()
        for name, _, module in (one.partition("=") for one in names):
            found.setdefault(face, {})[name] = module if home == _MODULES else f"{home}:{name}"
    return found


def complete(face: ModuleType) -> None:
    """Let a face show what the table has for it; a face that loads names by itself asks its own way first."""
    shown = vars(face)
    shown["__getattr__"] = _looked_up(face, shown.get("__getattr__"))
    own: Callable[[], list[str]] = shown.get("__dir__", lambda: list(shown))
    shown["__dir__"] = lambda: sorted({*own(), *_homes().get(face.__name__, ())})


def _looked_up(face: ModuleType, own: Callable[[str], Any] | None) -> Callable[[str], Any]:
    """The `__getattr__` of a face."""

    def get(name: str) -> Any:  # Any: whatever the name stands for
        try:
            if own is not None:
                return own(name)
        except AttributeError:
            if name.startswith("__"):
                raise
        home = None if name.startswith("__") else _homes().get(face.__name__, {}).get(name)
        if home is None:
            raise AttributeError(f"module {face.__name__!r} has no attribute {name!r}")
        module, _, inner = home.partition(":")
        value = vars(face)[name] = getattr(import_module(module), inner) if inner else import_module(module)
        return value

    return get
