"""Modules of a model: names independent of wrappers, tied parameters, hooks and replaceable forwards.

Start with `names.py`; `forwarding.py` replaces and restores a forward, `hooks.py` holds Accelerate's hook classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten.lazy import exports

__all__: tuple[str, ...] = ()

# hidden from type checkers, which would otherwise accept any attribute
if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(__name__, {}, extensible=True)
