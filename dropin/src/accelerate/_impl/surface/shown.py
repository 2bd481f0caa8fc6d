"""Read-only attributes that show what lies elsewhere, one line each."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any


def shown(get: str | Callable[[Any], Any], doc: str) -> Any:  # Any: type checkers take it for a plain attribute
    """A read-only property: what lies at a dotted path below the object, or what a function of the object gives."""
    return property(attrgetter(get) if isinstance(get, str) else get, doc=doc)
