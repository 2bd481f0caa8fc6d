"""Entry point of a rank started by srun, mpirun or jsrun: all ranks check in, then the program runs. Imports torch.

Rank 0 serves the store at MASTER_ADDR:MASTER_PORT for its lifetime, and every rank's process group uses that store.
"""

from __future__ import annotations

import errno
import socket
import sys
import time
from datetime import timedelta
from typing import Final

from torch.distributed import DistError, PrefixStore, TCPStore

from hasten.errors import LaunchError
from hasten.launch import worker
from hasten.launch.base import Target
from hasten.launch.checkin import (
    Report,
    check_agreement,
    code_digest,
    gather_reports,
    package_versions,
    rank_table,
)
from hasten.launch.failure import PREEMPTED
from hasten.launch.run import say
from hasten.runtime import env as environment
from hasten.runtime.store import join, serve
from hasten.runtime.topology import Topology

_TIMEOUT_S: Final = 120.0
_LAST_WORDS_S: Final = 1.0
_SAVING_S: Final = 60.0


def check_in(topology: Topology, target: Target, config: str) -> TCPStore:
    """Return the store of the job, after every rank has checked in on it.

    Raises: LaunchError on every rank if ranks are missing, duplicated, or differ in settings, code or versions.
    """
    store = _open_store(topology)
    report = Report(
        host=socket.gethostname(),
        address=store.host,
        num_processes=1,
        device=f"local rank {topology.local_rank}",
        config=config,
        code=code_digest(target),
        program=target.name,
        versions=package_versions(),
    )
    reports = gather_reports(
        PrefixStore("hasten/check_in", store),
        topology.rank,
        topology.world_size,
        report,
        timeout_s=_TIMEOUT_S,
        name=lambda i: f"rank {i}",
        waiting=say if topology.is_main else lambda words: None,
    )
    check_agreement(reports)
    if topology.is_main:
        say(
            f"{len(reports)} processes ({topology.source})\n{rank_table(reports, 'task')}"
        )
    return store


def _open_store(topology: Topology) -> TCPStore:
    """Return the store at the rendezvous address, served by rank 0; a second rank 0 joins it to get the error too."""
    address, _, port_text = (
        topology.meeting_point().removeprefix("tcp://").rpartition(":")
    )
    host, port, timeout = (
        address.strip("[]"),
        int(port_text),
        timedelta(seconds=_TIMEOUT_S),
    )
    try:
        if (
            topology.is_main
            and (served := _serve(topology, host, port, timeout)) is not None
        ):
            return served
        return join(host, port, timeout)
    except (DistError, OSError) as error:
        raise LaunchError(
            f"rank {topology.rank} of {topology.world_size} cannot reach rank 0 at {address}:{port} "
            f"({str(error).splitlines()[0][:200]}). Check that rank 0 runs there and the port is free; "
            f"set MASTER_ADDR and MASTER_PORT otherwise."
        ) from error


def _serve(
    topology: Topology, host: str, port: int, timeout: timedelta
) -> TCPStore | None:
    """Return the store, or None if the port is in use; binding is the only test without a race."""
    try:
        return serve(
            host, port, timeout, alone=topology.local_world_size == topology.world_size
        )
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise


def main() -> None:
    """Check in, then run the program named on the command line as a rank of the job."""
    env = environment.snapshot()
    module = sys.argv[1:2] == ["-m"]
    words = sys.argv[2:] if module else sys.argv[1:]
    topology = Topology.from_env(env)
    try:
        store = check_in(
            topology,
            Target(words[0], tuple(words[1:]), module=module),
            env.get(environment.CONFIG, ""),
        )
    except LaunchError as error:
        say(f"rank {topology.rank}: {error}")
        if topology.is_main:
            # rank 0 serves the store from which the others read the reason
            time.sleep(_LAST_WORDS_S)
        sys.exit(1)
    environment.replace(
        {
            **env,
            "RANK": str(topology.rank),
            "WORLD_SIZE": str(topology.world_size),
            "LOCAL_RANK": str(topology.local_rank),
            "LOCAL_WORLD_SIZE": str(topology.local_world_size),
            "GROUP_RANK": str(topology.node_rank),
            "MASTER_ADDR": store.host,
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    )
    try:
        worker.main()
    except SystemExit as end:
        if end.code == PREEMPTED:
            _leave_together(PrefixStore("hasten/leaving", store), topology)
        raise
    finally:
        if topology.is_main:
            del store  # served until the program has ended


def _leave_together(store: PrefixStore, topology: Topology) -> None:
    """Wait until all ranks have saved. Stop signals are already ignored.

    The cluster's launcher ends the other ranks as soon as the first has exited, and their exit codes would hide this one.
    """
    count, deadline = topology.world_size, time.monotonic() + _SAVING_S
    try:
        saved = store.add("saved", 1)
        while saved < count and time.monotonic() < deadline:
            time.sleep(0.02)
            saved = store.add("saved", 0)
        num_seen, last_wait_s = store.add("seen", 1), time.monotonic() + _LAST_WORDS_S
        # rank 0 serves the store
        while topology.is_main and num_seen < count and time.monotonic() < last_wait_s:
            time.sleep(0.02)
            num_seen = store.add("seen", 0)
    except DistError:  # rank 0 has exited, so it has seen all ranks
        return


if __name__ == "__main__":
    # Run the module under its real name: `__main__` is about to become the user's program.
    from hasten.launch.cluster import task

    task.main()
