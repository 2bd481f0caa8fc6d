"""A value of a settings file that remembers its line."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Marked:
    """A value of a settings file with the line it begins on; mappings and lists hold further marked values."""

    value: Any
    line: int

    def plain(self) -> Any:
        """Return the value without marks, all the way down."""
        if isinstance(self.value, Mapping):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value
