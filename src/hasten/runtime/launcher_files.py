"""Files exchanged by a launcher and its ranks: a rank's error, and ended ranks. Does not import torch."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from hasten.runtime import env as environment

_ENDED: Final = "ended-ranks"


def write_ended(codes: Mapping[int, int], env: Mapping[str, str]) -> None:
    """Write the exit codes of ranks that have ended since the last (re)start of the job."""
    _write(_ENDED, json.dumps({str(rank): code for rank, code in codes.items()}), env)


def ended_ranks(env: Mapping[str, str]) -> dict[int, int]:
    """Return the exit codes of ranks that have ended since the last (re)start, as reported by the launcher."""
    found = json.loads(_read(_ENDED, env) or "{}")
    return {int(rank): int(code) for rank, code in found.items()}


def _write(name: str, text: str, env: Mapping[str, str]) -> None:
    if folder := env.get(environment.MEMORY_FOLDER):
        draft = Path(folder) / f"{name}.draft"
        # memory may be full: ranks then notice the problem later, by timeout
        with suppress(OSError):
            draft.write_text(text)
            draft.replace(Path(folder) / name)


def _read(name: str, env: Mapping[str, str]) -> str:
    folder = env.get(environment.MEMORY_FOLDER)
    try:
        return (Path(folder) / name).read_text() if folder else ""
    except OSError:  # no file yet
        return ""


ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
"""Variable in which a launcher passes the path of the file."""


def write_error(path: Path, summary: str, text: str, *, echo: bool = False) -> None:
    """Write the error of this rank: `summary` in one line, `text` in full; `echo` if the cause is on another rank.

    Raises: OSError if the file cannot be written.
    """
    now = time.time()
    message = {
        "message": summary,
        "errorCode": 1,
        "extraInfo": {"py_callstack": text, "timestamp": str(int(now))},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    own = {"time": now, "traceback": text, "summary": summary, "echo": echo}
    draft.write_text(json.dumps({"message": message, "hasten": own}))
    draft.replace(path)
