"""The processes of one replica that may be lost: their start, and the rank that ended them."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hasten.launch.base import Proc
from hasten.launch.failure import Failure, read_failure
from hasten.launch.guard import kill_groups
from hasten.runtime.launcher_files import ERROR_FILE

_LOCAL_ADDRESS: Final = "127.0.0.1"


@dataclass(slots=True)
class ReplicaProcesses:
    """The present processes of one replica, one for each rank."""

    processes: list[subprocess.Popen[bytes]]
    error_files: list[str]
    began_s: float
    quick: int
    """Errors of the replica's own program so far, one soon after the other."""
    signalled: bool = False
    """True if the signal to stop was sent to the processes."""

    @property
    def groups(self) -> list[int]:
        """The process groups, which include the loaders' workers."""
        return [process.pid for process in self.processes]

    def find_ended_rank(self) -> tuple[int, int] | None:
        """Return the rank that ended the replica, and its exit code; None while the replica runs.

        A rank that was killed ends it rather than one that has met an error, which may be due to the former; of several errors, the
        one that was recorded first.
        """
        exit_codes = [process.poll() for process in self.processes]
        failed_ranks = []
        for rank, exit_code in enumerate(exit_codes):
            if exit_code:
                failed_ranks.append((rank, exit_code))
        if failed_ranks:
            return min(
                failed_ranks,
                key=lambda failed_rank: (
                    failed_rank[1] > 0,
                    _written_at_s(self.error_files[failed_rank[0]]),
                    failed_rank[0],
                ),
            )
        return None if None in exit_codes else (0, 0)

    @property
    def running(self) -> bool:
        """True if a process has not ended."""
        return any(process.poll() is None for process in self.processes)

    def read_failure_of(self, rank: int, exit_code: int) -> Failure:
        """Return the end of a rank, with the error that it has recorded."""
        pid = self.processes[rank].pid
        error_file = self.error_files[rank]
        return read_failure(
            rank,
            socket.gethostname(),
            exit_code,
            pid,
            error_file=error_file,
            time=time.time(),
        )

    def send_signal(self, signal_number: int) -> None:
        """Send a signal to all processes."""
        for process_group in self.groups:
            # a rank that has ended before the others
            with suppress(ProcessLookupError):
                os.killpg(process_group, signal_number)

    def kill_processes(self) -> None:
        """Kill all processes, and those that they have started."""
        kill_groups(self.groups)
        for process in self.processes:
            process.wait()


def start_replica(
    proc: Proc,
    common_variables: Mapping[str, str],
    error_file: str,
    num_quick_failures: int,
) -> ReplicaProcesses:
    """Start the processes of a replica with these variables; `error_file` begins the names of their error files."""
    num_ranks = proc.count
    variables = dict(common_variables)
    if num_ranks > 1:
        variables |= {
            "MASTER_ADDR": _LOCAL_ADDRESS,
            "MASTER_PORT": str(_find_free_port()),
        }
        variables |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    processes = []
    error_files = []
    for rank in range(num_ranks):
        error_files.append(f"{error_file}-{rank}.json")
        if num_ranks > 1:
            rank_variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        else:
            rank_variables = {}
        env = {**variables, **rank_variables, ERROR_FILE: error_files[rank]}
        processes.append(subprocess.Popen(proc.argv, env=env, start_new_session=True))
    return ReplicaProcesses(
        processes, error_files, time.monotonic(), num_quick_failures
    )


def _written_at_s(path: str) -> float:
    """Return the time at which a file was written; infinity if there is none."""
    try:
        return Path(path).stat().st_mtime
    except OSError:  # the process was killed, or has ended without an error
        return math.inf


def _find_free_port() -> int:
    """Return a port that is free now, for the meeting of a replica's ranks."""
    with socket.create_server((_LOCAL_ADDRESS, 0)) as probe:
        return int(probe.getsockname()[1])
