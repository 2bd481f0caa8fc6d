"""Modules of a model: names independent of wrappers, tied parameters, hooks, replaceable forwards, and losses in chunks.

Start with `names.py`; `forwarding.py` replaces and restores a forward, `hooks.py` holds Accelerate's hook classes, `chunked_loss.py`
and `lazy_logits.py` the loss of large vocabularies. The names in `__all__` are public.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from hasten.lazy import exports

if TYPE_CHECKING:
    from hasten.modules.chunked_loss import ChunkedCrossEntropyLoss as ChunkedCrossEntropyLoss
    from hasten.modules.lazy_logits import use_chunked_loss as use_chunked_loss

# public name -> the module that defines it
_PUBLIC: Final = MappingProxyType[str, str](
    {
        "ChunkedCrossEntropyLoss": "hasten.modules.chunked_loss",
        "use_chunked_loss": "hasten.modules.lazy_logits",
    }
)

__all__ = [*_PUBLIC]  # pyright: ignore[reportUnsupportedDunderAll]

if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept any attribute
    __getattr__, __dir__ = exports(__name__, _PUBLIC)
