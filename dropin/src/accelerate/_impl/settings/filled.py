"""Settings that were not given, from the variables that stand for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate._impl.environment.variables import environment, str_to_bool

Reading = tuple[Callable[[str], Any], Any]
"""What makes a value of a variable's word, and the value where there is no word. Any: values of settings."""


def fill_from_variables(settings: object, prefix: str, **readings: Reading) -> None:
    """Give attributes that are None what the variables of their names behind `prefix` say, or their defaults."""
    for name, (read, default) in readings.items():
        if getattr(settings, name) is None:
            word = environment().get(f"{prefix}{name.upper()}")
            setattr(settings, name, read(word) if word else default)


def is_yes(word: str) -> bool:
    return bool(str_to_bool(word))
