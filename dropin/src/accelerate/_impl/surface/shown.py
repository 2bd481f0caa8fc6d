"""What lies elsewhere, shown as it is there: attributes, one line each, and functions with another one's signature."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from operator import attrgetter
from typing import Any, TypeVar

Adapter = TypeVar("Adapter", bound=Callable[..., Any])
# Any in this file: type checkers take what is shown for plain attributes and functions.


def shown_property(
    get: str | Callable[[Any], Any],
    doc: str,
    change: Callable[[Any, Any], None] | None = None,
) -> Any:
    """Return a property: what lies at a dotted path below the object, or what a function of it gives; settable with `change`."""
    return property(attrgetter(get) if isinstance(get, str) else get, change, doc=doc)


def like(function: Callable[..., Any]) -> Callable[[Adapter], Adapter]:
    """Return a decorator for what adapts a function of hasten's: name, signature and documentation are that function's."""

    def dress_function(adapter: Adapter) -> Adapter:
        update_wrapper(
            adapter,
            function,
            assigned=("__name__", "__qualname__", "__doc__"),
            updated=(),
        )
        return adapter

    return dress_function
