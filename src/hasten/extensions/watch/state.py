"""Records that a waiting rank posts about itself, and observations of ranks that post nothing."""

from __future__ import annotations

from typing import Literal

import msgspec

from hasten.extensions.watch.stacks import MAY_WAIT, Kind

Status = Literal["here", "left", "failed", "gone", "stopped", "silent"]
Cause = Literal[
    "left",
    "failed",
    "gone",
    "stopped",
    "silent",
    "elsewhere",
    "other call",
    "same call",
    "user code",
    "data",
    "checkpoint",
    "compiling",
    "uneven",
]
"""The causes of a stall."""
Thread = Literal["asleep", "runs", "disk"]
"""A thread's state in the kernel: sleeping, running or runnable, or waiting for a disk or for swapped memory."""
IDLE_SHARE = 0.15
"""Share of one core below which a process counts as idle."""


class CodeLine(msgspec.Struct, frozen=True):
    """A line of the user's code, and the function called there."""

    site: str
    call: str = ""
    text: str = ""

    def describe_line(self) -> str:
        """Return the line as text: `train.py:42 gather(preds)`."""
        return f"{self.site} {self.text or self.call}".rstrip()


class State(msgspec.Struct, frozen=True):
    """State of one rank, as observed by itself."""

    rank: int
    host: str
    pid: int
    quiet_s: float
    """Seconds since the start of its last collective."""
    kind: Kind
    spot: CodeLine
    function: str
    step: int
    cpu_share: float
    counts: dict[str, int]
    """Number of collectives so far, by group; barriers of a group are under `barrier/…`."""
    barrier: bool = False
    in_dataset: bool = False
    block: str = ""
    io_quiet_s: float = 0.0
    """Seconds since the process last read or wrote a file."""
    last: CodeLine | None = None
    """The latest collective of hasten, if the rank is not in a collective now."""
    last_ago_s: float = 0.0
    stack: tuple[str, ...] = ()
    moves: bool = False
    """True if the rank started a collective recently, and posts only because another rank asked."""
    turn: int = 0
    """Number of the post; a number that does not grow belongs to a process that cannot post."""
    peers: dict[int, Status] = {}
    """Ranks of the same machine that are stopped or gone."""
    thread: Thread = "asleep"

    @property
    def waits(self) -> bool:
        """True if the rank appears to wait for other ranks."""
        idle = self.cpu_share < IDLE_SHARE and self.thread == "asleep"
        return self.kind == "collective" or (self.kind in MAY_WAIT and idle)


class Note(msgspec.Struct, frozen=True):
    """A rank's entry in the store: its host and process, and later its end."""

    rank: int
    host: str
    pid: int
    started: int
    """Start time of the process in clock ticks, which distinguishes it from a later process with the same pid."""
    ended: str = ""
    failed: bool = False
    namespace: str = ""
    """The pid namespace."""
    counts: dict[str, int] | None = None
    """Number of collectives started before the rank ended; None if unknown."""


class ObservedRank(msgspec.Struct, frozen=True):
    """State of one rank, as known to the rank that writes the report."""

    rank: int
    status: Status
    state: State | None = None
    note: Note | None = None
