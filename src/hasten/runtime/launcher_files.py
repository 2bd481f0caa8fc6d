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


def write_ended(exit_codes: Mapping[int, int], env: Mapping[str, str]) -> None:
    """Write the exit codes of ranks that have ended since the last (re)start of the job."""
    _write_file(
        _ENDED,
        json.dumps({str(rank): exit_code for rank, exit_code in exit_codes.items()}),
        env,
    )


def ended_ranks(env: Mapping[str, str]) -> dict[int, int]:
    """Return the exit codes of ranks that have ended since the last (re)start, as reported by the launcher."""
    exit_codes = json.loads(_read_file(_ENDED, env) or "{}")
    return {int(rank): int(exit_code) for rank, exit_code in exit_codes.items()}


def _write_file(file_name: str, text: str, env: Mapping[str, str]) -> None:
    if folder := env.get(environment.MEMORY_FOLDER):
        draft_path = Path(folder) / f"{file_name}.draft"
        # memory may be full: ranks then notice the problem later, by timeout
        with suppress(OSError):
            draft_path.write_text(text)
            draft_path.replace(Path(folder) / file_name)


def _read_file(file_name: str, env: Mapping[str, str]) -> str:
    folder = env.get(environment.MEMORY_FOLDER)
    try:
        return (Path(folder) / file_name).read_text() if folder else ""
    except OSError:  # no file yet
        return ""


ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
"""Variable in which a launcher passes the path of the file."""


def write_error(path: Path, summary: str, text: str, *, echo: bool = False) -> None:
    """Write the error of this rank: `summary` in one line, `text` in full; `echo` if the cause is on another rank.

    Raises: OSError if the file cannot be written.
    """
    now_s = time.time()
    torch_message = {
        "message": summary,
        "errorCode": 1,
        "extraInfo": {"py_callstack": text, "timestamp": str(int(now_s))},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    draft_path = path.with_suffix(".draft")
    error_record = {"time": now_s, "traceback": text, "summary": summary, "echo": echo}
    draft_path.write_text(
        json.dumps({"message": torch_message, "hasten": error_record})
    )
    draft_path.replace(path)
