"""What the kernel tells about a process of this machine: whether it runs, is stopped or has ended, and its reading and writing."""

from __future__ import annotations

from pathlib import Path

from hasten.debug.state import Status


def start_ticks(pid: int | str = "self") -> int:
    """When the process began, in clock ticks since the machine started; 0 where the kernel does not tell."""
    fields = _fields(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def status_of(pid: int, started: int) -> Status:
    """Whether the process runs ("here"), is stopped or gone. On systems without /proc everything seems to run."""
    if not Path("/proc/self/stat").exists():
        return "here"
    fields = _fields(pid)
    if not fields or fields[0] in "ZX" or (started and int(fields[19]) != started):
        return "gone"
    return "stopped" if fields[0] in "Tt" else "here"


def io_count() -> int:
    """Bytes that this process has read and written through files, pipes and sockets; 0 where the kernel does not tell."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:  # other systems, or a container that hides it: saves then count as quiet
        return 0
    return sum(int(line.partition(":")[2]) for line in lines if line.startswith(("rchar", "wchar")))


def _fields(pid: int | str) -> list[str]:
    """The fields of /proc/PID/stat from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
