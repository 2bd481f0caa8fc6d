"""What faces load on first use: `lazy.json` has names by module, `elsewhere.txt` those that another module defines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from hasten.lazy import without_collections

_FACES: Final[dict[str, dict[str, str]]] = json.loads(
    Path(__file__).with_suffix(".json").read_text()
)


class Deferred:
    """A module that is imported when an attribute of it is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:  # Any: whatever the name stands for
        value = getattr(import_module(self._name), name)
        vars(self)[name] = value
        return value


def lazy(face: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a face: names by module; `whole` modules are searched in order, the fastest to load first."""
    homes = {home: names.split() for home, names in _FACES[face].items()}
    searched_modules = homes.pop("whole", [])
    modules = frozenset([*homes.pop("modules"), *searched_modules])
    table = {name: module for module, names in homes.items() for name in names}
    unread = [f"{face}.{name}" for name in searched_modules]

    def read_until(name: str) -> None:
        while unread and name not in table:
            module = unread.pop(0)
            table.update(
                {
                    name_in_module: module
                    for name_in_module in _defined_names(module)
                    if name_in_module not in table
                }
            )

    def names() -> list[str]:
        read_until("")
        return sorted({*table, *modules})

    def get(name: str) -> Any:  # Any: whatever the name stands for
        if name in modules:
            return import_module(f"{face}.{name}")
        if name == "__all__":
            visible_names = []
            for name_in_module in names():
                if name_in_module in table:
                    visible_names.append(name_in_module)
            return visible_names
        if not name.startswith("_"):
            read_until(name)
        if name not in table:
            raise AttributeError(f"module {face!r} has no attribute {name!r}")
        with without_collections():
            value = vars(sys.modules[face])[name] = getattr(
                import_module(table[name]), name
            )
        return value

    return get, names


def _defined_names(module: str) -> list[str]:
    """Return the names a face's modules and rooms define: not what a module shows of another face or of hasten."""
    members = {}
    for member_name, member in vars(import_module(module)).items():
        if not isinstance(member, ModuleType):
            members[member_name] = member
    rooms = (module.rpartition(".")[0], "accelerate._impl")
    homes = {}
    for member_name, member in members.items():
        homes[member_name] = str(getattr(member, "__module__", module))
    public_names = []
    for member_name, home in homes.items():
        if home.startswith(rooms) and not member_name.startswith("_"):
            public_names.append(member_name)
    return public_names


@cache
def imported_names() -> dict[str, dict[str, str]]:
    """Return the module of each name, by face; a line is a face, a home and the names it has there, `-` and NAME=MODULE for modules."""
    names_by_face: dict[str, dict[str, str]] = {}
    for line in Path(__file__).with_name("elsewhere.txt").read_text().splitlines():
        face, home, *names = line.split()
        for imported_name, _, module in (word.partition("=") for word in names):
            if home == "-":
                names_by_face.setdefault(face, {})[imported_name] = module
            else:
                names_by_face.setdefault(face, {})[imported_name] = (
                    f"{home}:{imported_name}"
                )
    return names_by_face


def complete_face(face: ModuleType) -> None:
    """Let a face show what the table has for it; a face that loads names by itself asks its own way first."""
    shown = vars(face)
    shown["__getattr__"] = _looked_up(face, shown.get("__getattr__"))
    previous_dir: Callable[[], list[str]] = shown.get("__dir__", lambda: list(shown))
    shown["__dir__"] = lambda: sorted(
        {*previous_dir(), *imported_names().get(face.__name__, ())}
    )


def _looked_up(
    face: ModuleType, previous_getattr: Callable[[str], Any] | None
) -> Callable[[str], Any]:

    def get(name: str) -> Any:  # Any: whatever the name stands for
        try:
            if previous_getattr is not None:
                return previous_getattr(name)
        except AttributeError:
            if name.startswith("__"):
                raise
        if name.startswith("__"):
            home = None
        else:
            home = imported_names().get(face.__name__, {}).get(name)
        if home is None:
            raise AttributeError(f"module {face.__name__!r} has no attribute {name!r}")
        module, _, inner = home.partition(":")
        value = vars(face)[name] = (
            getattr(import_module(module), inner) if inner else import_module(module)
        )
        return value

    return get
