"""The error file of a rank: why it ended, in the form that hasten's launcher and torch's elastic agent read. No torch here."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Final

ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
"""The variable in which a launcher names the file."""


def write(path: Path, summary: str, text: str, *, echo: bool = False) -> None:
    """Write down why this rank ends: `summary` in a line, `text` at length; `echo` if it was another rank that failed.

    Raises: OSError if the file cannot be written.
    """
    now = time.time()
    message = {"message": summary, "errorCode": 1, "extraInfo": {"py_callstack": text, "timestamp": str(int(now))}}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    own = {"time": now, "traceback": text, "summary": summary, "echo": echo}
    draft.write_text(json.dumps({"message": message, "hasten": own}))
    draft.replace(path)
