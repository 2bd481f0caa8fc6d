"""Settings that were not given, from the variables that stand for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate._impl.environment.variables import environment, str_to_bool

Reading = tuple[Callable[[str], Any], Any]
"""What makes a value of a variable's word, and the value where there is no word. Any: values of settings."""


def fill_from_variables(settings: object, prefix: str, **readings: Reading) -> None:
    """Give attributes that are None what the variables of their names behind `prefix` say, or their defaults."""
    for field_name, (read, default) in readings.items():
        if getattr(settings, field_name) is None:
            variable_text = environment().get(f"{prefix}{field_name.upper()}")
            setattr(
                settings, field_name, read(variable_text) if variable_text else default
            )


def is_yes(word: str) -> bool:
    return bool(str_to_bool(word))
