"""The run log: timings of every step's phases, and events with their times, for `hasten report`.

Two files per rank and start of the program in `<project_dir>/run_log`: `rank0-<milliseconds>.steps` holds one record of 44 bytes per update,
`rank0-<milliseconds>.jsonl` one line per event. Both are appended to about once a second and are not held open.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

FOLDER: Final = "run_log"
PARTS: Final = ("data", "forward", "backward", "communication", "optimizer", "logging", "other")
_FIRST_PARTS: Final = ("data", "forward", "backward", "optimizer", "other")
"""Phases of older logs, which do not list them."""
_RECORD: Final = struct.Struct("<d9f")
_EVERY_S: Final = 1.0

# Any in this file: facts and events are JSON values.


def step_dtype(parts: Sequence[str] = PARTS) -> np.dtype[np.void]:
    """Return the dtype of a record of the steps file."""
    return np.dtype([("time", "<f8"), *((part, "<f4") for part in parts), ("samples", "<f4"), ("memory_mb", "<f4")])


class RunLog:
    """Writer of the log of one rank. A failing disk stops the log but not the training."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        facts: Callable[[], Mapping[str, Any]],
        memory: Callable[[], int | None],
        collectives_s: Callable[[], float] = lambda: 0.0,
        gradients_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Create a log; `collectives_s` returns the time in collectives so far, `gradients_s` a backward's wait for gradients."""
        self._folder = folder
        self._rank = rank
        self._facts = facts
        self._memory = memory
        self._began_s = time.time()
        self._stem = ""
        self._records = bytearray()
        self._events: list[bytes] = []
        self._memory_mb = 0.0
        self._flushed_s = self._last_s = time.perf_counter()
        self._collectives_s, self._gradients_s = collectives_s, gradients_s
        self._collected_s, self._gradient_s, self._aside_s = collectives_s(), 0.0, 0.0
        self._spent = dict.fromkeys(PARTS, 0.0)
        self._samples = 0.0
        self._updated = False
        self._begun = False
        self.broken = ""
        """Error message of the disk, after which nothing is written."""

    # -- phases of a step ------------------------------------------------------------------------------------------
    def _take(self, part: str) -> float:
        """Add the time since the last mark to a phase, without collectives and logging; returns the current time."""
        now, collected = time.perf_counter(), self._collectives_s()
        spent = self._spent
        waited = collected - self._collected_s
        spent["communication"] += waited
        spent[part] += max(now - self._last_s - waited - self._aside_s, 0.0)
        self._last_s, self._collected_s, self._aside_s = now, collected, 0.0
        return now

    def asked(self) -> None:
        """Mark the request for the next batch, which ends a step that has made an update."""
        if self._begun:
            now = self._take("other")
            if self._updated:
                self._commit(now)
            return
        self._begun, self._last_s, self._collected_s = True, time.perf_counter(), self._collectives_s()

    def got(self, num_samples: int) -> None:
        """Mark the arrival of a batch, which ends the wait for data."""
        self._take("data")
        self._samples += num_samples

    def backward_begins(self) -> None:
        """Mark the start of backward, which ends the forward pass and the loss."""
        self._take("forward")

    def backward_done(self, exchanged: bool = False) -> None:
        """Mark the end of backward; with `exchanged`, the wait for gradients of other ranks counts as communication."""
        self._take("backward")
        if exchanged and self._gradient_s:
            waited = min(self._gradient_s, self._spent["backward"])
            self._spent["backward"] -= waited
            self._spent["communication"] += waited

    def optimizer_begins(self) -> None:
        """Mark the start of an update; the time since backward, such as clipping, counts as other."""
        self._take("other")

    def optimizer_done(self) -> None:
        """Mark the end of an update, applied or skipped."""
        self._take("optimizer")
        self._updated = True

    def logged(self, seconds: float) -> None:
        """Add the duration of a logging call, which is subtracted from the current phase."""
        self._spent["logging"] += seconds
        self._aside_s += seconds

    def skipped(self) -> None:
        """Record that the update was skipped."""
        self.event("skipped")

    def _commit(self, now: float) -> None:
        if now - self._flushed_s >= _EVERY_S:
            self.flush()
        self._records += _RECORD.pack(time.time(), *self._spent.values(), self._samples, self._memory_mb)
        self._spent = dict.fromkeys(PARTS, 0.0)
        self._samples = 0.0
        self._updated = False

    # -- events ----------------------------------------------------------------------------------------------------
    def event(self, kind: str, **details: Any) -> None:
        """Record an event with the current time."""
        self._events.append(msgspec.json.encode({"event": kind, "time": time.time(), **details}) + b"\n")

    def flush(self) -> None:
        """Append pending records to the files, once a training has started; the first time also the facts about the run."""
        if not self._begun:
            return
        self._flushed_s = time.perf_counter()
        self._memory_mb = (self._memory() or 0) / 1e6
        self._gradient_s = self._gradients_s()
        records, events = bytes(self._records), b"".join(self._events)
        self._records.clear()
        self._events.clear()
        if self.broken or not (records or events):
            return
        try:
            if not self._stem:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._stem = f"rank{self._rank}-{int(self._began_s * 1000)}"
                first = {"event": "started", "time": self._began_s, "rank": self._rank, "parts": PARTS, **self._facts()}
                events = msgspec.json.encode(first) + b"\n" + events
            for ending, content in (("steps", records), ("jsonl", events)):
                if content:
                    with (self._folder / f"{self._stem}.{ending}").open("ab") as file:
                        file.write(content)
        except OSError as error:  # a full or missing disk: the training has priority
            self.broken = str(error)

    def close(self) -> None:
        """Write pending records and the end event, if a training has started."""
        if self._begun:
            if self._updated:
                self._commit(time.perf_counter())
            self.event("ended")
            self.flush()


@dataclass(frozen=True, slots=True)
class LoggedRank:
    """Log of one rank from one start of the program to its end."""

    rank: int
    steps: NDArray[Any]
    """One record of `step_dtype()` per update."""
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def started(self) -> Mapping[str, Any]:
        """Facts about the run at its start; empty if the start is missing."""
        return next((event for event in self.events if event.get("event") == "started"), {})


def read_run_log(folder: Path) -> list[LoggedRank]:
    """Return all logs in a run's folder, by time; incomplete last records and lines are omitted."""
    found = []
    for path in sorted(folder.glob("rank*-*.jsonl"), key=_began):
        lines = _lines(path)
        first = next((line for line in lines if line.get("event") == "started"), {"parts": PARTS})
        dtype = step_dtype(first.get("parts", _FIRST_PARTS))
        content = path.with_suffix(".steps").read_bytes() if path.with_suffix(".steps").exists() else b""
        whole = len(content) // dtype.itemsize * dtype.itemsize
        rank = int(path.stem.split("-")[0].removeprefix("rank"))
        found.append(LoggedRank(rank, _all_parts(np.frombuffer(content[:whole], dtype=dtype)), lines))
    return found


def _all_parts(steps: NDArray[Any]) -> NDArray[Any]:
    """Return the records with all current phases; those unknown to an older log are 0."""
    if steps.dtype == step_dtype():
        return steps
    made = np.zeros(len(steps), dtype=step_dtype())
    for name in set(steps.dtype.names or ()) & set(made.dtype.names or ()):
        made[name] = steps[name]
    return made


def _began(path: Path) -> tuple[int, int]:
    rank, began = path.stem.removeprefix("rank").split("-")
    return int(began), int(rank)


def _lines(path: Path) -> list[dict[str, Any]]:
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            rows.append(msgspec.json.decode(line))
        except msgspec.DecodeError:  # truncated when its process died
            continue
    return rows
