"""What users hook into saving and loading the state of a run, and how a hook is taken off again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], None]  # Any: state dicts hold extra state
LoadHook = Callable[[list[nn.Module], str], None]


class HookHandle:
    """Takes a hook off again."""

    def __init__(self, hooks: dict[int, Any], key: int) -> None:  # Any: hooks of either kind
        self._hooks = hooks
        self._key = key

    def remove(self) -> None:
        """Take the hook off; harmless to repeat."""
        self._hooks.pop(self._key, None)
