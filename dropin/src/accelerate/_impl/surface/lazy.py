"""Faces that are tables: names by the module that has them, each loaded on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(face: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a face; `homes` are its names by module, and under the empty one its modules."""
    modules = frozenset(homes.get("", "").split())
    table = {name: module for module, names in homes.items() if module for name in names.split()}

    def get(name: str) -> Any:  # Any: whatever the name stands for
        if name in modules:
            return import_module(f"{face}.{name}")
        if name not in table:
            raise AttributeError(f"module {face!r} has no attribute {name!r}")
        value = vars(sys.modules[face])[name] = getattr(import_module(table[name]), name)
        return value

    return get, lambda: sorted({*table, *modules})
