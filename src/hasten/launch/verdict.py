"""The last word on a failed launch, left in a file for the program that started the launcher, such as a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from hasten.launch.failure import Failure, end_words
from hasten.runtime import env as environment

VARIABLE: Final = "HASTEN_VERDICT_FILE"
"""Names the file; set by whoever wants to know."""


def leave(words: str, env: Mapping[str, str] | None = None) -> None:
    """Write down why the launch failed, if somebody asked for it; the first word stays."""
    path = (environment.snapshot() if env is None else env).get(VARIABLE)
    if path and not Path(path).exists():
        Path(path).write_text(words)


def failure_words(first: Failure, *, many_machines: bool = False) -> str:
    """The failure that ended the job in one sentence."""
    host = f" on {first.host}" if many_machines else ""
    if first.summary:
        return f"rank {first.rank}{host} failed: {first.summary} (its traceback is in the output above)"
    if not first.code:
        return f"rank {first.rank}{host} ended early, while other ranks still needed it; see the output above"
    return f"rank {first.rank}{host} failed: {end_words(first.code)}; see the output above"
