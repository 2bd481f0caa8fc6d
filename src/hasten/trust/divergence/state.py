"""What a rank says about itself when it has waited, and what the others can see of one that says nothing."""

from __future__ import annotations

from typing import Literal

import msgspec

from hasten.trust.stall.stacks import MAY_WAIT, Kind

Status = Literal["here", "left", "failed", "gone", "stopped", "silent"]
Cause = Literal[
    "left",
    "failed",
    "gone",
    "stopped",
    "silent",
    "unreachable",
    "elsewhere",
    "other call",
    "other shape",
    "same call",
    "user code",
    "data",
    "checkpoint",
    "compiling",
    "importing",
    "debugger",
    "uneven",
]
"""The causes of a stall."""
Thread = Literal["asleep", "runs", "disk"]
"""A thread's state in the kernel: it waits for something, has or wants a processor, or waits for a disk or for swapped memory."""
IDLE_SHARE = 0.15
"""A process that uses less than this part of one core computes nothing."""


class Spot(msgspec.Struct, frozen=True):
    """A line of the user's code, and what was called there."""

    site: str
    call: str = ""
    text: str = ""

    def words(self) -> str:
        """`train.py:42 gather(preds)`."""
        return f"{self.site} {self.text or self.call}".rstrip()


class State(msgspec.Struct, frozen=True):
    """One rank, seen by itself."""

    rank: int
    host: str
    pid: int
    quiet_s: float
    """Seconds since its last collective began."""
    kind: Kind
    spot: Spot
    function: str
    step: int
    cpu_share: float
    counts: dict[str, int]
    """Collectives so far, by group; the barriers of a group under `barrier/…`."""
    barrier: bool = False
    in_dataset: bool = False
    block: str = ""
    io_quiet_s: float = 0.0
    """Seconds since the process last read or wrote a file."""
    op: str = ""
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    last: Spot | None = None
    """The newest collective of hasten, while the rank is elsewhere."""
    last_ago_s: float = 0.0
    stack: tuple[str, ...] = ()
    moves: bool = False
    """Whether it began a collective a moment ago, and says this only because it was asked."""
    turn: int = 0
    """Grows with every post: a number that stands still is that of a process that cannot post."""
    peers: dict[int, Status] = {}
    """Ranks of the same machine that are stopped or gone."""
    activities: dict[int, str] = {}
    """What the kernel says of the other ranks of the same machine."""
    thread: Thread = "asleep"

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks, as far as it can be seen."""
        idle = self.cpu_share < IDLE_SHARE and self.thread == "asleep"
        return self.kind == "collective" or (self.kind in MAY_WAIT and idle)


class Note(msgspec.Struct, frozen=True):
    """What a rank leaves behind: where it runs, and later how it ended."""

    rank: int
    host: str
    pid: int
    started: int
    """The start time of the process in clock ticks: a number that a later process with this pid does not have."""
    ended: str = ""
    failed: bool = False
    namespace: str = ""
    """The namespace of the pid."""
    counts: dict[str, int] | None = None
    """The collectives it had begun when it ended; None if it did not say."""


class Seen(msgspec.Struct, frozen=True):
    """One rank, as the speaker knows it."""

    rank: int
    status: Status
    state: State | None = None
    note: Note | None = None
    activity: str = ""
    """What the kernel says of its process, if its machine has a rank that can tell."""
