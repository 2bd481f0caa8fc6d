"""What went wrong in a script, as the first line that says it: from its exception, or from what its process wrote. No torch."""

from __future__ import annotations

import re
import signal
from typing import Final

_LONGEST: Final = 160
_RAISED: Final = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:: .*)?")
"""The line of a traceback that names the exception, and not a frame or a note of the interpreter."""
_PREFIX: Final = re.compile(r"^\[[^\]]*\]:? ?")
"""What launchers put before the lines of a rank."""
_WHERE: Final = " Stack trace:"
"""Torch's messages go on in the same line with the place in the user's code."""


def happened(error: BaseException) -> str:
    """The kind of an exception, and the first line of its message."""
    lines = str(error).strip().splitlines()
    return _short(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)


def in_output(stderr: str, code: int) -> str:
    """Why a process ended with `code`: what its last traceback raised, else its last line, else the code."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = [_PREFIX.sub("", line) for line in stderr.splitlines()]
    begins = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if begins:
        for line in lines[begins[-1] + 1 :]:
            if line and not line[0].isspace() and _RAISED.fullmatch(line):
                return _short(_unqualified(line))
    said = [line.strip() for line in lines if line.strip()]
    return _short(said[-1]) if said else f"exit code {code}"


def _unqualified(line: str) -> str:
    """The line with the class alone, as `happened` names it."""
    kind, colon, message = line.partition(":")
    return f"{kind.rpartition('.')[2]}{colon}{message}"


def _short(text: str) -> str:
    """The text as far as it says what happened, in sentences or words that fit a table."""
    text = text.partition(_WHERE)[0].strip()
    if len(text) <= _LONGEST:
        return text
    sentence = text[:_LONGEST].rfind(". ")
    return text[: sentence + 1] if sentence > 0 else f"{text[:_LONGEST].rpartition(' ')[0] or text[:_LONGEST]} …"
