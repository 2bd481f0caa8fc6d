"""Names that faces show although another module defines them: `elsewhere.txt`, read when a face lacks a name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
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


class Face(ModuleType):
    """A face of which names can be replaced: what `unittest.mock.patch` sets on it acts in the rooms behind it."""

    def __setattr__(self, name: str, value: Any) -> None:  # Any: whatever the name stands for
        replaced = vars(self).setdefault("__replaced__", {})
        if name in replaced and value is replaced[name][0]:
            delattr(self, name)
        elif getattr(value, "__name__", None) != f"{self.__name__}.{name}":  # no module that its import sets
            rooms = [(room, room[name]) for room in _behind(self) if name in room]
            replaced.setdefault(name, (vars(self).get(name), rooms))
            for room, _ in rooms:
                room[name] = value
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        for room, value in vars(self).get("__replaced__", {}).pop(name, (None, ()))[1]:
            room[name] = value
        super().__delattr__(name)


def _behind(face: ModuleType) -> list[dict[str, Any]]:
    """The names of the modules whose functions and methods a face shows."""
    classes = [vars(one) for one in vars(face).values() if isinstance(one, type)]
    found = [one for names in (vars(face), *classes) for one in names.values() if isinstance(one, FunctionType)]
    return list({id(one.__globals__): one.__globals__ for one in found if one.__globals__ is not vars(face)}.values())


def complete(face: ModuleType) -> None:
    """Let a face show what the table has for it; a face that loads names by itself asks its own way first."""
    face.__class__ = Face
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
