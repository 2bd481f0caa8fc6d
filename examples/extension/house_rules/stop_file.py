"""A part of a run that stops it when a file appears: `STOP_FILE=/shared/stop hasten launch train.py`."""

import os
from pathlib import Path
from typing import Any

from hasten.extending import RunPart


class StopFile(RunPart):
    """Part that preempts the run as a cluster does: `accelerator.preempted` is true, and the loop saves and ends."""

    def built(self, run: Any) -> None:  # Any: the components of a run
        self._path = Path(os.environ["STOP_FILE"])
        self._preemption = run.preemption

    def after_update(self, optimizer: Any, applied: bool) -> None:
        """Look for the file after each update. Ranks: every rank."""
        if self._path.exists():
            self._preemption.set()
