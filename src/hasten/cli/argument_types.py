"""Numbers on the command line: whole numbers and seconds within a range, refused in words."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Final

_MOST: Final = 10**12


def whole(least: int = 0, most: int = _MOST) -> Callable[[str], int]:
    """Return the type of an argument that takes a whole number from `least` to `most`."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return number

    return read


def seconds(text: str) -> float:
    """Return a positive number of seconds. Raises: ArgumentTypeError for other text."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return number
