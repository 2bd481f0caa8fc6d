"""Giving classes and functions the module they have always been known under, wherever the file is that defines them."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import get_type_hints


def settle(room: str, face: str) -> None:
    """Make `face` the home of the room's public classes and functions: messages name it, pickles find them there.

    Annotations of classes are resolved first, while the names they use can still be found.
    """
    for name, one in vars(sys.modules[room]).items():
        if name.startswith("_") or not isinstance(one, type | FunctionType) or one.__module__ != room:
            continue
        if isinstance(one, type) and (written := vars(one).get("__annotations__")):
            found = get_type_hints(one)
            one.__annotations__ = {field: found[field] for field in written}
        elif "<" in one.__qualname__:  # made inside of another function, from a table
            one.__name__ = one.__qualname__ = name
        one.__module__ = face
