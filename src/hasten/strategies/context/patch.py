"""Replacing scaled_dot_product_attention while a block runs: the only file that does so.

The function is replaced in every module that has it as a global, not by a torch function mode: modes belong to one
thread, and activations that are recomputed in a backward on a device are recomputed in another one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

_NAME: Final = "scaled_dot_product_attention"
Attention = Callable[..., Tensor]


class AttentionPatch:
    """Knows where the function is, so that a block does not search for it again."""

    def __init__(self) -> None:
        self._places: list[tuple[dict[str, Any], str]] = []  # Any: globals of modules
        self._seen = 0

    def original(self) -> Attention:
        """The function as it is now."""
        found: Attention = getattr(F, _NAME)
        return found

    @contextmanager
    def replaced(self, stand_in: Attention) -> Iterator[None]:
        """A block in which `stand_in` is called instead, by every caller that looks the function up when it calls."""
        original = self.original()
        self._find(original)
        places = list(self._places)
        fast_path = torch.backends.mha.get_fastpath_enabled()
        for names, name in places:
            names[name] = stand_in
        torch.backends.mha.set_fastpath_enabled(False)  # it would compute attention without calling the function
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            for names, name in places:
                names[name] = original

    def _find(self, original: Attention) -> None:
        """Search the modules loaded since the last search."""
        if len(sys.modules) == self._seen:
            return
        self._seen = len(sys.modules)
        self._places = [
            (names, name)
            for names in [vars(module) for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
            for name, value in list(names.items())
            if value is original
        ]
