"""Faces that load what they show on first use (`lazy.json`): names by the module that has them, and all that some modules define."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_FACES: Final[dict[str, dict[str, str]]] = json.loads(Path(__file__).with_suffix(".json").read_text())


def lazy(face: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a face: names by module; `whole` modules are searched in order, the fastest to load first."""
    homes = {home: names.split() for home, names in _FACES[face].items()}
    whole = homes.pop("whole", [])
    modules = frozenset([*homes.pop("modules"), *whole])
    table = {name: module for module, names in homes.items() for name in names}
    unread = [f"{face}.{name}" for name in whole]

    def read_until(name: str) -> None:
        while unread and name not in table:
            module = unread.pop(0)
            table.update({one: module for one in _defined(module) if one not in table})

    def names() -> list[str]:
        read_until("")
        return sorted({*table, *modules})

    def get(name: str) -> Any:  # Any: whatever the name stands for
        if name in modules:
            return import_module(f"{face}.{name}")
        if name == "__all__":
            return [one for one in names() if one in table]
        if not name.startswith("_"):
            read_until(name)
        if name not in table:
            raise AttributeError(f"module {face!r} has no attribute {name!r}")
        value = vars(sys.modules[face])[name] = getattr(import_module(table[name]), name)
        return value

    return get, names


def _defined(module: str) -> list[str]:
    """The names a face's modules and rooms define: not what a module shows of another face or of hasten."""
    found = {name: one for name, one in vars(import_module(module)).items() if not isinstance(one, ModuleType)}
    rooms = (module.rpartition(".")[0], "accelerate._impl")
    homes = {name: str(getattr(one, "__module__", module)) for name, one in found.items()}
    return [name for name, home in homes.items() if home.startswith(rooms) and not name.startswith("_")]
