"""The run log: timings of every step's phases, and events with their times, for `hasten report` and the metrics.

Two files per rank and start of the program in `<project_dir>/run_log`: `rank0-<milliseconds>.steps` holds one record of 52 bytes per update,
`rank0-<milliseconds>.jsonl` one line per event. Both are appended to about once a second and are not held open. Without a folder the
times are only counted, for metrics.
"""

from __future__ import annotations

import os
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

FOLDER: Final = "run_log"
PARTS: Final = (
    "data",
    "forward",
    "backward",
    "communication",
    "optimizer",
    "other",
    "evaluation",
    "checkpoint",
    "stall",
)
USEFUL: Final = ("forward", "backward", "communication", "optimizer", "other")
"""Phases of a useful step."""
STEP_PARTS: Final = ("data", *USEFUL)
"""Phases of a training step; the others of `PARTS` interrupt steps."""
_RECORD: Final = struct.Struct(f"<d{len(PARTS) + 2}f")
_EVERY_S: Final = 1.0

# Any in this file: facts and events are JSON values.


def step_dtype() -> np.dtype[np.void]:
    """Return the dtype of a record of the steps file."""
    return np.dtype(
        [
            ("time", "<f8"),
            *((phase, "<f4") for phase in PARTS),
            ("samples", "<f4"),
            ("memory_mb", "<f4"),
        ]
    )


class RunLog:
    """Writer of the log of one rank. A failing disk stops the log but not the training."""

    def __init__(
        self,
        folder: Path | None,
        rank: int,
        facts: Callable[[], Mapping[str, Any]],
        memory: Callable[[], int | None],
        collectives_s: Callable[[], float] = lambda: 0.0,
        gradients_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Create a log; `collectives_s` returns the time in collectives so far, `gradients_s` a backward's wait for gradients.

        Without a folder nothing is written.
        """
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
        self._collectives_s = collectives_s
        self._gradients_s = gradients_s
        self._collected_s = collectives_s()
        self._gradient_s = 0.0
        self.spent = dict.fromkeys(PARTS, 0.0)
        """Seconds in each phase since the first request for a batch; a phase is added when it ends."""
        self.samples = 0
        """Samples of all batches of training, over all ranks."""
        self._in_batch = 0
        self._recorded = (0.0,) * len(PARTS)
        self._recorded_samples = 0
        self._waited_s = 0.0
        self._updated = False
        self._has_phases = False
        self._stalls: deque[float] = deque()
        self.process_began_s = process_began_s()
        """Start of the process, in seconds since 1970."""
        self.startup_s: float | None = None
        """Seconds from the start of the process to the first request for a batch; None before it."""
        self.updated_s = self._last_s
        """Time of the latest update by `time.perf_counter()`, or of the start."""
        self._due_s = 0.0
        self.every_second: Callable[[], None] | None = None
        """Called after an update, once a second."""
        self.num_skipped = self.num_stalls = self.num_saves = 0
        self.last_save: tuple[float, float] | None = None
        """Time of the newest complete checkpoint's state, in seconds since 1970, and the seconds that its save took."""
        self.broken = ""
        """Error message of the disk, after which nothing is written."""

    # -- phases of a step ------------------------------------------------------------------------------------------
    def _end_phase(self, phase: str) -> float:
        """Add the time since the last mark to a phase, without collectives; returns the current time."""
        now_s = time.perf_counter()
        spent_s = self.spent
        collected_s = self._collectives_s()
        waited_s = collected_s - self._collected_s
        spent_s["communication"] += waited_s
        passed_s = now_s - self._last_s - waited_s
        if passed_s > 0.0:
            spent_s[phase] += passed_s
        self._last_s = now_s
        self._collected_s = collected_s
        return now_s

    def batch_requested(self, is_unused: bool = False) -> None:
        """Mark the request for the next batch, which ends a step that has made an update.

        `unused` means that no backward pass used the loader's previous batch: it was an evaluation's.
        """
        if self._has_phases:
            if is_unused and not self._updated:
                now_s = self._end_phase("evaluation")
                self.spent["data"] -= self._waited_s
                self.spent["evaluation"] += self._waited_s
                self._waited_s = 0.0
            else:
                now_s = self._end_phase("other")
                self.samples += self._in_batch
            self._in_batch = 0
            if self._updated:
                self._commit_step(now_s)
            return
        self._has_phases, self._last_s, self._collected_s = (
            True,
            time.perf_counter(),
            self._collectives_s(),
        )
        self.startup_s = max(time.time() - self.process_began_s, 0.0)

    def batch_arrived(self, num_samples: int) -> None:
        """Mark the arrival of a batch, which ends the wait for data."""
        data_s = self.spent["data"]
        self._end_phase("data")
        self._waited_s = self.spent["data"] - data_s
        self._in_batch = num_samples

    def backward_begins(self) -> None:
        """Mark the start of backward, which ends the forward pass and the loss."""
        self._end_phase("forward")

    def backward_done(self, exchanged: bool = False) -> None:
        """Mark the end of backward; with `exchanged`, the wait for gradients of other ranks counts as communication."""
        backward_s = self.spent["backward"]
        self._end_phase("backward")
        if exchanged and self._gradient_s:
            waited_s = min(self._gradient_s, self.spent["backward"] - backward_s)
            self.spent["backward"] -= waited_s
            self.spent["communication"] += waited_s

    def optimizer_begins(self) -> None:
        """Mark the start of an update; the time since backward, such as clipping, counts as other."""
        self._end_phase("other")

    def optimizer_done(self) -> None:
        """Mark the end of an update, applied or skipped."""
        self.updated_s = now_s = self._end_phase("optimizer")
        self._updated = True
        if now_s >= self._due_s:
            self._due_s = now_s + _EVERY_S
            if self.every_second is not None:
                self.every_second()

    def record_skip(self) -> None:
        """Record that the update was skipped."""
        self.num_skipped += 1
        self.record_event("skipped")

    def checkpoint_begins(self) -> None:
        """Mark the start of a save or load, which ends the current phase."""
        if self._has_phases:
            self._end_phase("other")

    def checkpoint_done(self) -> None:
        """Mark the end of a save or load; its collectives count as part of it."""
        if self._has_phases:
            now_s = time.perf_counter()
            self.spent["checkpoint"] += max(now_s - self._last_s, 0.0)
            self._last_s, self._collected_s = now_s, self._collectives_s()

    def record_stall(self, seconds: float, over: bool) -> None:
        """Record that ranks waited for each other without progress, in any thread; `over` means that they continue."""
        if over:
            self._stalls.append(seconds)
        else:
            self.num_stalls += 1
            self._write_now(
                {"event": "stalled", "time": time.time(), "seconds": round(seconds, 1)}
            )

    def _write_now(self, event: Mapping[str, Any]) -> None:
        """Append an event to its file without the pending ones, which belong to the training thread."""
        if self._folder is None or not self._stem or self.broken:
            return
        try:
            with (self._folder / f"{self._stem}.jsonl").open("ab") as file:
                file.write(msgspec.json.encode(event) + b"\n")
        except OSError as error:
            self.broken = str(error)

    def _commit_step(self, now_s: float) -> None:
        # the stall happened inside one phase of this step, the longest
        while self._stalls:
            seconds = self._stalls.popleft()
            spent_s = self.spent
            longest_phase = max(
                STEP_PARTS,
                key=lambda phase: spent_s[phase] - self._recorded[PARTS.index(phase)],
            )
            moved_s = min(
                seconds,
                spent_s[longest_phase] - self._recorded[PARTS.index(longest_phase)],
            )
            spent_s[longest_phase] -= moved_s
            spent_s["stall"] += moved_s
        if now_s - self._flushed_s >= _EVERY_S:
            self.flush()
        self._updated = False
        if self._folder is None:
            return
        current = tuple(self.spent.values())
        phase_seconds = []
        for spent_after_s, recorded_s in zip(current, self._recorded, strict=True):
            phase_seconds.append(spent_after_s - recorded_s)
        self._records += _RECORD.pack(
            time.time(),
            *phase_seconds,
            self.samples - self._recorded_samples,
            self._memory_mb,
        )
        self._recorded = current
        self._recorded_samples = self.samples

    # -- events ----------------------------------------------------------------------------------------------------
    def record_event(self, kind: str, **details: Any) -> None:
        """Record an event with the current time."""
        if self._folder is not None:
            self._events.append(
                msgspec.json.encode({"event": kind, "time": time.time(), **details})
                + b"\n"
            )

    def record_save(self, taken_s: float, seconds: float) -> None:
        """Record a complete checkpoint of the state at `taken_s`, in any thread; `seconds` is the time of the whole save."""
        self.last_save = (taken_s, seconds)
        self.num_saves += 1

    def flush(self) -> None:
        """Append pending records to the files, once a training has started; the first time also the facts about the run."""
        if not self._has_phases:
            return
        self._flushed_s = time.perf_counter()
        if self._folder is None:
            return
        self._memory_mb = (self._memory() or 0) / 1e6
        self._gradient_s = self._gradients_s()
        records = bytes(self._records)
        events = b"".join(self._events)
        self._records.clear()
        self._events.clear()
        if self.broken or not (records or events):
            return
        try:
            if not self._stem:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._stem = f"rank{self._rank}-{int(self._began_s * 1000)}"
                started_event = {
                    "event": "started",
                    "time": self._began_s,
                    "rank": self._rank,
                    "parts": PARTS,
                }
                started_event |= {
                    "process_began": self.process_began_s,
                    "startup_s": self.startup_s,
                    **self._facts(),
                }
                events = msgspec.json.encode(started_event) + b"\n" + events
            for ending, content in (("steps", records), ("jsonl", events)):
                if content:
                    with (self._folder / f"{self._stem}.{ending}").open("ab") as file:
                        file.write(content)
        except OSError as error:  # a full or missing disk: the training has priority
            self.broken = str(error)

    def close(self) -> None:
        """Write pending records and the end event, if a training has started."""
        if self._has_phases:
            if self._updated:
                self.samples = self.samples + self._in_batch
                self._in_batch = 0
                self._commit_step(time.perf_counter())
            unrecorded = zip(PARTS, self.spent.values(), self._recorded, strict=True)
            rest_s = {}
            for phase, spent_s, recorded_s in unrecorded:
                if spent_s > recorded_s:
                    rest_s[phase] = round(spent_s - recorded_s, 4)
            self.record_event(
                "ended",
                rest=rest_s,
            )
            self.flush()


def process_began_s() -> float:
    """Return the start of this process in seconds since 1970; the current time where the kernel does not report it."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):  # other systems
        return time.time()
    return min(time.time() - up + ticks / os.sysconf("SC_CLK_TCK"), time.time())


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
        for event in self.events:
            if event.get("event") == "started":
                return event
        return {}


def read_run_log(folder: Path) -> list[LoggedRank]:
    """Return the logs in a run's folder, by time, without those of versions with other phases.

    Incomplete last records and lines are omitted.
    """
    logs = []
    dtype = step_dtype()
    for path in sorted(folder.glob("rank*-*.jsonl"), key=_start_order):
        lines = _read_lines(path)
        started_event = next(
            (line for line in lines if line.get("event") == "started"), {"parts": PARTS}
        )
        if tuple(started_event.get("parts", ())) != PARTS:
            continue
        if path.with_suffix(".steps").exists():
            content = path.with_suffix(".steps").read_bytes()
        else:
            content = b""
        num_complete_bytes = len(content) // dtype.itemsize * dtype.itemsize
        rank = int(path.stem.split("-")[0].removeprefix("rank"))
        logs.append(
            LoggedRank(
                rank, np.frombuffer(content[:num_complete_bytes], dtype=dtype), lines
            )
        )
    return logs


def _start_order(path: Path) -> tuple[int, int]:
    rank, began = path.stem.removeprefix("rank").split("-")
    return int(began), int(rank)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    logged_events = []
    for line in path.read_bytes().splitlines():
        try:
            logged_events.append(msgspec.json.decode(line))
        except msgspec.DecodeError:  # truncated when its process died
            continue
    return logged_events
