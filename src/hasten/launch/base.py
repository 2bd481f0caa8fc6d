"""What a launch is, as data: the plan that --dry-run prints, tests compare and `run` executes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hasten.config.masking import masked, masked_value
from hasten.config.root import Config

LauncherName = Literal["single", "torchrun", "task", "slurm", "mpi", "deepspeed", "xla"]
MeetingKind = Literal["fixed", "c10d", "etcd", "etcd-v2"]


@dataclass(frozen=True, slots=True)
class Target:
    """The user's program: a script, a module name or any executable, and its arguments."""

    name: str
    args: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for: resolved settings and the program to start."""

    config: Config
    target: Target
    handoff: str = ""
    """The settings as one string, given to every process as HASTEN_CONFIG."""


@dataclass(frozen=True, slots=True)
class Proc:
    """One command to run, with the variables it gets beyond the launcher's own environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    count: int = 1
    """How many equal processes it stands for; the agent numbers them by RANK and LOCAL_RANK."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where and how the machines of one job find each other."""

    kind: MeetingKind = "fixed"
    min_machines: int = 1
    max_machines: int = 1
    machine_rank: int | None = None
    """None: decided when all have arrived; the machine that owns `address` becomes 0, the rest by name."""
    address: str = "127.0.0.1"
    port: int = 0
    """0: a free one, possible on one machine only."""
    run_id: str = "hasten"
    join_timeout_s: float = 120.0
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        """Whether the job has exactly one machine."""
        return self.max_machines == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """What the elastic agent does with the processes of this machine."""

    max_restarts: int = 0
    monitor_interval_s: float = 0.1
    stop_grace_s: float = 120.0
    """How long processes may take to end after SIGTERM: a preempted run saves first."""
    role: str = "default"
    log_dir: str | None = None
    tee: str | None = None
    quiet: bool = False
    debug: bool = False
    expected_world_size: int | None = None
    """Processes over all machines, if the user named a number; checked when all have arrived."""
    check_in: Literal["error", "warn", "off"] = "error"


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file that the plan writes before anything starts."""

    path: str
    text: str
    executable: bool = False


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The exact commands of this machine, and why they are what they are."""

    launcher: LauncherName
    procs: tuple[Proc, ...]
    notes: tuple[str, ...] = ()
    meeting: Meeting | None = None
    supervision: Supervision = field(default_factory=Supervision)
    files: tuple[PlannedFile, ...] = ()
    target: Target | None = None

    def render(self) -> str:
        """Return the plan as text that a person reads and a shell understands, with credentials masked."""
        lines = [f"launcher: {self.launcher}"]
        lines += [f"note: {note}" for note in self.notes]
        if self.meeting is not None:
            lines.append("rendezvous: " + _meeting_words(self.meeting))
        if self.launcher == "torchrun":
            lines.append("restarts: " + str(self.supervision.max_restarts))
        for planned in self.files:
            lines += [f"file {planned.path}:", *("    " + row for row in masked(planned.text).splitlines())]
        index = 0
        for proc in self.procs:
            last = index + proc.count - 1
            title = f"process {index}" if proc.count == 1 else f"processes {index}-{last} (LOCAL_RANK counts up)"
            index = last + 1
            lines += [
                f"{title}:",
                *(
                    f"    {name}={shlex.quote(masked_value(name, value))} \\"
                    for name, value in sorted(proc.env.items())
                ),
            ]
            lines.append("    " + masked(shlex.join(proc.argv)))
        return "\n".join(lines)


def _meeting_words(meeting: Meeting) -> str:
    if meeting.alone:
        return f"one machine, {meeting.address}, " + (f"port {meeting.port}" if meeting.port else "a free port")
    low, high = meeting.min_machines, meeting.max_machines
    count = f"{high} machines" if low == high else f"{low} to {high} machines"
    rank = "this machine's rank is decided there" if meeting.machine_rank is None else f"rank {meeting.machine_rank}"
    options = "".join(f", {name}={value}" for name, value in sorted(meeting.options.items()))
    return (
        f"{count} at {meeting.address}:{meeting.port} ({meeting.kind}), {rank}, "
        f"waiting up to {meeting.join_timeout_s:g} s{options}"
    )
