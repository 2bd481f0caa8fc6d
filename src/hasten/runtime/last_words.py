"""Error file of a rank, in the format read by hasten's launcher and torch's elastic agent. Does not import torch."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Final

ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
"""Variable in which a launcher passes the path of the file."""


def write(path: Path, summary: str, text: str, *, echo: bool = False) -> None:
    """Write the error of this rank: `summary` in one line, `text` in full; `echo` if the cause is on another rank.

    Raises: OSError if the file cannot be written.
    """
    now = time.time()
    message = {"message": summary, "errorCode": 1, "extraInfo": {"py_callstack": text, "timestamp": str(int(now))}}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    own = {"time": now, "traceback": text, "summary": summary, "echo": echo}
    draft.write_text(json.dumps({"message": message, "hasten": own}))
    draft.replace(path)
