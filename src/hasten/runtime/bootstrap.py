"""Start of the process group, and creation of the ProcessContext."""

from __future__ import annotations

import atexit
import dataclasses
import errno
import functools
import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Final
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import Store
from torch.distributed.distributed_c10d import _get_default_store

from hasten.comm.base import Comm
from hasten.comm.collective_log import CollectiveRecord
from hasten.comm.encoding import PLAIN, Codec
from hasten.comm.local import LocalComm
from hasten.comm.process_group import ProcessGroupComm
from hasten.errors import CommError, DeviceError, PeerFailedError, TopologyError
from hasten.runtime import env, launcher_files, store
from hasten.runtime.context import ProcessContext
from hasten.runtime.devices import kind_of, use_device
from hasten.runtime.logs import get_logger
from hasten.runtime.mesh import Groups, destroy_groups
from hasten.runtime.mesh_plan import MeshSpec
from hasten.runtime.nodelist import ranks_in_words
from hasten.runtime.topology import Topology

log = get_logger(__name__)


_SIZES_AGREE: Final = "the world sizes agree"
_LONGEST_PAUSE_S: Final = 0.5
_POLL_INTERVAL_S: Final = 1.0
_FIRST_REPORT_S: Final = 5.0

EndedRanks = Callable[[], Mapping[int, int]]
"""Exit codes of the ranks that have ended, as reported by the launcher."""


class RankRegistration:
    """Registration of all ranks in the store, before the process group is formed."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        time_limit: timedelta,
        read_ended_ranks: EndedRanks = dict,
        address: str = "",
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._deadline = time.monotonic() + time_limit.total_seconds()
        self._ended = read_ended_ranks
        self._address = address

    def wait(self) -> None:
        """Wait until all ranks have registered. After five seconds, and again later, the lowest registered rank logs the missing ones.

        Ranks: every rank.
        Raises: TopologyError on every registered rank when two ranks differ in the world size; PeerFailedError when a rank ended before
        registering; RuntimeError on timeout.
        """
        self._store.set(f"roll/{self._rank}", str(self._size))
        if self._rank == 0:
            self._store.set("roll", self._compare_sizes())
        self._wait_for("roll")
        roll_answer = self._store.get("roll").decode()
        if roll_answer != _SIZES_AGREE:
            raise TopologyError(roll_answer)

    def _compare_sizes(self) -> str:
        """Return rank 0's answer to all ranks: agreement on the world size, or the rank that differs."""
        for other_rank in range(1, self._size):
            self._wait_for(f"roll/{other_rank}")
            other_size = int(self._store.get(f"roll/{other_rank}"))
            if other_size != self._size:
                return (
                    f"rank {other_rank} was started with WORLD_SIZE={other_size} and rank 0 with WORLD_SIZE={self._size}, so they would wait for "
                    "ranks that do not exist. Start all ranks of the job with the same number of processes and machines, and end what is left "
                    "of other jobs that meet at this address."
                )
        return _SIZES_AGREE

    def _wait_for(self, store_key: str) -> None:
        start_s = checked_at_s = time.monotonic()
        next_report_s = _FIRST_REPORT_S
        while not self._store.check([store_key]):
            now_s = time.monotonic()
            if now_s > self._deadline:
                raise RuntimeError("not all ranks have come")
            if now_s - checked_at_s > _POLL_INTERVAL_S:
                checked_at_s = now_s
                self._refuse_ended(store_key)
                if now_s - start_s > next_report_s:
                    next_report_s *= 2
                    self._report_missing(now_s - start_s)
            time.sleep(min(0.002 + 0.05 * (now_s - start_s), _LONGEST_PAUSE_S))

    def _is_registered(self, rank: int) -> bool:
        is_registered: bool = self._store.check([f"roll/{rank}"])
        return is_registered

    def _refuse_ended(self, store_key: str) -> None:
        codes_by_rank = {
            rank: exit_code
            for rank, exit_code in self._ended().items()
            if not self._is_registered(rank)
        }
        if not codes_by_rank or self._store.check([store_key]):
            return
        shown_codes = ", ".join(
            sorted({f"exit code {exit_code}" for exit_code in codes_by_rank.values()})
        )
        raise PeerFailedError(
            f"{ranks_in_words(sorted(codes_by_rank))} ended ({shown_codes}) before making an Accelerator, so the other ranks would wait for it in vain. "
            "Let every rank make the Accelerator before it may leave: look for a sys.exit or return that depends on the rank."
        )

    def _report_missing(self, waited_s: float) -> None:
        if any(self._is_registered(lower_rank) for lower_rank in range(self._rank)):
            return
        missing_ranks = [
            rank for rank in range(self._size) if not self._is_registered(rank)
        ]
        if missing_ranks:
            plain_log.warning(
                "rank %d of %d waits for %s at %s (%.0f s)",
                self._rank,
                self._size,
                ranks_in_words(missing_ranks),
                self._address,
                waited_s,
            )


plain_log = logging.getLogger(__name__)  # logs on every rank
MeshOf = Callable[[int], MeshSpec]

_LEAVE_TIMEOUT: Final = timedelta(seconds=10)
"""Time that the rank serving the store waits at exit for the others to finish."""


@dataclasses.dataclass(frozen=True, slots=True)
class GroupSettings:
    """Settings for starting the process group."""

    backend: str | None = None
    init_method: str | None = None
    init_timeout_s: float = 300.0
    """Time limit for all ranks to join."""
    timeout_s: float = 1800.0
    """Time limit of a collective during training."""
    codec: Codec = PLAIN
    """Encoding of objects that ranks exchange."""


def start(
    topology: Topology,
    device: torch.device,
    mesh_of: MeshOf = MeshSpec.flat,
    settings: GroupSettings | None = None,
) -> ProcessContext:
    """Start the process group, unless one exists or there is only one process, and return the context of this process.

    `mesh_of` returns the mesh for a world size. A group started by this call is destroyed at exit.
    Ranks: every rank of the world.
    Raises: CommError when the ranks do not all join within the init timeout; TopologyError when their world sizes differ.
    """
    settings = settings or GroupSettings()
    if device.index is not None:
        use_device(device)
    if not dist.is_initialized() and topology.world_size > 1:
        _init_group(topology, device, settings)
    if dist.is_initialized() and dist.get_world_size() > 1:
        _freeze_garbage_of_forks()
        return _join_group(topology, device, mesh_of, settings)
    mesh = mesh_of(1)
    local_comm = LocalComm(device)
    # along any axes it is alone
    return ProcessContext(topology, mesh, device, local_comm, lambda *axes: local_comm)


@functools.cache  # registered once; torch and Python have no way to remove the callback
def _freeze_garbage_of_forks() -> None:
    """Exclude inherited objects from garbage collection in every fork of this process, such as a loader's worker.

    A collection there could destroy a process group that is waiting for collection here: its destructor would join
    threads that a fork does not have, and never return.
    """
    os.register_at_fork(after_in_child=gc.freeze)


def _join_group(
    topology: Topology,
    device: torch.device,
    mesh_of: MeshOf,
    group_settings: GroupSettings,
) -> ProcessContext:
    world_group = dist.group.WORLD
    assert world_group is not None, (
        "torch.distributed is initialised, so it has a world group"
    )
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    if (topology.rank, topology.world_size) != (rank, world_size):
        # other code has started the group
        topology = Topology(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
        )
    # the only access to the store of a group that was started by other code
    world_store = _get_default_store()
    collectives = CollectiveRecord()
    world_comm: Comm = ProcessGroupComm(
        world_group,
        world_store,
        device,
        group_settings.timeout_s,
        group_settings.codec,
        collectives,
    )
    mesh = mesh_of(topology.world_size)
    groups = Groups(
        mesh,
        topology.rank,
        world_comm,
        world_store,
        group_settings.timeout_s,
        group_settings.codec,
        collectives,
    )
    return ProcessContext(topology, mesh, device, world_comm, groups, collectives)


def _init_group(
    topology: Topology, device: torch.device, group_settings: GroupSettings
) -> None:
    rendezvous_url = group_settings.init_method or topology.meeting_point()
    init_timeout = timedelta(seconds=group_settings.init_timeout_s)
    start_s = time.monotonic()
    try:
        job_store, rank, world_size = _meet_ranks(
            rendezvous_url, topology, init_timeout
        )
        round_store = dist.PrefixStore(f"hasten/{topology.restart_count}", job_store)
        read_ended_ranks = functools.partial(launcher_files.ended_ranks, env.snapshot())
        RankRegistration(
            round_store,
            rank,
            world_size,
            init_timeout,
            read_ended_ranks,
            rendezvous_url,
        ).wait()
    except (RuntimeError, ValueError, OSError) as error:
        raise CommError(
            _rendezvous_failure(
                rendezvous_url, topology, time.monotonic() - start_s, error
            )
        ) from error
    job_store.set_timeout(init_timeout)
    dist.init_process_group(
        group_settings.backend or _backend_for(device),
        store=round_store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=group_settings.timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    serves_store = rank == 0 and not _served_by_launcher()
    atexit.register(_leave_group, rank, world_size, serves_store, os.getpid())


def _leave_group(rank: int, world_size: int, serves_store: bool, rank_pid: int) -> None:
    """Destroy the group at exit; the rank that serves the store waits a limited time until the others have finished.

    The others may still have to read its last messages, such as the completion of a barrier.
    """
    if os.getpid() != rank_pid:  # in a fork of the rank
        return
    world_store = _get_default_store() if dist.is_initialized() else None
    destroy_groups()
    if world_store is None:
        return
    # losing this message is harmless, and a killed rank cannot send it
    with suppress(*store.LOST):
        if not serves_store:
            world_store.set(f"hasten/left/{rank}", "1")
        # after an error this rank exits without waiting
        elif getattr(sys, "last_value", None) is None:
            world_store.wait(
                [f"hasten/left/{other_rank}" for other_rank in range(1, world_size)],
                _LEAVE_TIMEOUT,
            )


def _rendezvous_failure(
    rendezvous_url: str,
    topology: Topology,
    elapsed_s: float,
    error: BaseException,
) -> str:
    rank_text = f"rank {topology.rank} of {topology.world_size}"
    error_line = str(error).strip().partition("\n")[0]
    if "EADDRINUSE" in str(error) or "already in use" in str(error):
        return (
            f"{rank_text} cannot serve the meeting at {rendezvous_url}: another program uses this port, often a run that is still alive. Without it "
            f"the ranks do not find each other; end that program, or choose another MASTER_PORT (--main_process_port) on every rank."
        )
    return (
        f"{rank_text} did not meet the others at {rendezvous_url} within {elapsed_s:.0f} s ({error_line}). Without all ranks there is no "
        f"group to train in; check that every rank is started, that the address can be reached and that the port is free."
    )


def _meet_ranks(
    rendezvous_url: str, topology: Topology, init_timeout: timedelta
) -> tuple[dist.Store, int, int]:
    """Return the rendezvous store, rank and world size; rank 0 serves the store only on the address's interface."""
    url_parts = urlsplit(rendezvous_url)
    if url_parts.scheme == "tcp" and url_parts.hostname and url_parts.port is not None:
        if (
            store.is_loopback(url_parts.hostname)
            and (interface_name := store.loopback_interface()) is not None
        ):
            # every rank is on this machine: use only the loopback
            env.put_default("GLOO_SOCKET_IFNAME", interface_name)
            env.put_default("NCCL_SOCKET_IFNAME", interface_name)
        serves_store = (
            topology.is_main and not url_parts.query and not _served_by_launcher()
        )
        if serves_store and url_parts.port:
            try:
                return (
                    store.serve_store(url_parts.hostname, url_parts.port, init_timeout),
                    topology.rank,
                    topology.world_size,
                )
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                # this process may already serve a store there, which torch finds and shares
    store_rank_size: tuple[dist.Store, int, int] = next(
        dist.rendezvous(
            rendezvous_url, topology.rank, topology.world_size, timeout=init_timeout
        )
    )
    return store_rank_size


def _served_by_launcher() -> bool:
    """Return whether the store belongs to a process that outlives the ranks."""
    return "TORCHELASTIC_USE_AGENT_STORE" in env.snapshot()


def _backend_for(device: torch.device) -> str:
    kind = kind_of(device)
    if kind.backend is None:
        raise DeviceError(
            f"several processes were started on {device.type!r}, which has no collective library in this torch; run "
            "one process, or use the CPU (cpu=True, or `hasten launch --cpu`)."
        )
    return "gloo" if kind.backend == "gloo" else f"cpu:gloo,{kind.type}:{kind.backend}"
