"""Tools for testing distributed code: a pool of warm workers on gloo, and a pytest plugin.

Start with `pool.py` (`@ranks(2)`) and `plugin.py`. The names in `__all__` are public.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from hasten.lazy import exports

if TYPE_CHECKING:
    from hasten.runtime.context import ProcessContext as ProcessContext
    from hasten.testing.pool import Pool as Pool
    from hasten.testing.pool import ranks as ranks

# public name -> the module that defines it
_PUBLIC: Final = MappingProxyType[str, str](
    {
        "ProcessContext": "hasten.runtime.context",
        "Pool": "hasten.testing.pool",
        "ranks": "hasten.testing.pool",
    }
)

__all__ = [*_PUBLIC]  # pyright: ignore[reportUnsupportedDunderAll]

# hidden from type checkers, which would otherwise accept any attribute
if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(__name__, _PUBLIC)
