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
from hasten.runtime.mesh import Groups, stop
from hasten.runtime.mesh_plan import MeshSpec
from hasten.runtime.nodelist import ranks_in_words
from hasten.runtime.topology import Topology

log = get_logger(__name__)


_SIZES_AGREE: Final = "the world sizes agree"
_LONGEST_PAUSE_S: Final = 0.5
_LOOK_INTERVAL_S: Final = 1.0
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
        limit: timedelta,
        ended: EndedRanks = dict,
        address: str = "",
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._deadline = time.monotonic() + limit.total_seconds()
        self._ended = ended
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
        answer = self._store.get("roll").decode()
        if answer != _SIZES_AGREE:
            raise TopologyError(answer)

    def _compare_sizes(self) -> str:
        """Return rank 0's answer to all ranks: agreement on the world size, or the rank that differs."""
        for other in range(1, self._size):
            self._wait_for(f"roll/{other}")
            other_size = int(self._store.get(f"roll/{other}"))
            if other_size != self._size:
                return (
                    f"rank {other} was started with WORLD_SIZE={other_size} and rank 0 with WORLD_SIZE={self._size}, so they would wait for "
                    "ranks that do not exist. Start all ranks of the job with the same number of processes and machines, and end what is left "
                    "of other jobs that meet at this address."
                )
        return _SIZES_AGREE

    def _wait_for(self, key: str) -> None:
        started = last_look = time.monotonic()
        next_report_s = _FIRST_REPORT_S
        while not self._store.check([key]):
            now = time.monotonic()
            if now > self._deadline:
                raise RuntimeError("not all ranks have come")
            if now - last_look > _LOOK_INTERVAL_S:
                last_look = now
                self._refuse_ended(key)
                if now - started > next_report_s:
                    next_report_s *= 2
                    self._report_missing(now - started)
            time.sleep(min(0.002 + 0.05 * (now - started), _LONGEST_PAUSE_S))

    def _is_registered(self, rank: int) -> bool:
        registered: bool = self._store.check([f"roll/{rank}"])
        return registered

    def _refuse_ended(self, key: str) -> None:
        codes = {
            rank: code
            for rank, code in self._ended().items()
            if not self._is_registered(rank)
        }
        if not codes or self._store.check([key]):
            return
        shown_codes = ", ".join(
            sorted({f"exit code {code}" for code in codes.values()})
        )
        raise PeerFailedError(
            f"{ranks_in_words(sorted(codes))} ended ({shown_codes}) before making an Accelerator, so the other ranks would wait for it in vain. "
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

_LINGER: Final = timedelta(seconds=10)
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
    use_device(device)
    if not dist.is_initialized() and topology.world_size > 1:
        _init(topology, device, settings)
    if dist.is_initialized() and dist.get_world_size() > 1:
        _freeze_garbage_of_forks()
        return _joined(topology, device, mesh_of, settings)
    mesh = mesh_of(1)
    world = LocalComm(device)
    # along any axes it is alone
    return ProcessContext(topology, mesh, device, world, lambda *axes: world)


@functools.cache  # registered once; torch and Python have no way to remove the callback
def _freeze_garbage_of_forks() -> None:
    """Exclude inherited objects from garbage collection in every fork of this process, such as a loader's worker.

    A collection there could destroy a process group that is waiting for collection here: its destructor would join
    threads that a fork does not have, and never return.
    """
    os.register_at_fork(after_in_child=gc.freeze)


def _joined(
    topology: Topology, device: torch.device, mesh_of: MeshOf, settings: GroupSettings
) -> ProcessContext:
    group = dist.group.WORLD
    assert group is not None, (
        "torch.distributed is initialised, so it has a world group"
    )
    rank, size = dist.get_rank(), dist.get_world_size()
    if (topology.rank, topology.world_size) != (rank, size):
        # other code has started the group
        topology = Topology(
            rank=rank, world_size=size, local_rank=rank, local_world_size=size
        )
    # the only access to the store of a group that was started by other code
    notes = _get_default_store()
    collectives = CollectiveRecord()
    world: Comm = ProcessGroupComm(
        group, notes, device, settings.timeout_s, settings.codec, collectives
    )
    mesh = mesh_of(topology.world_size)
    groups = Groups(
        mesh,
        topology.rank,
        world,
        notes,
        settings.timeout_s,
        settings.codec,
        collectives,
    )
    return ProcessContext(topology, mesh, device, world, groups, collectives)


def _init(topology: Topology, device: torch.device, settings: GroupSettings) -> None:
    url = settings.init_method or topology.meeting_point()
    within, start = timedelta(seconds=settings.init_timeout_s), time.monotonic()
    try:
        found, rank, size = _meet(url, topology, within)
        notes = dist.PrefixStore(f"hasten/{topology.restart_count}", found)
        ended = functools.partial(launcher_files.ended_ranks, env.snapshot())
        RankRegistration(notes, rank, size, within, ended, url).wait()
    except (RuntimeError, ValueError, OSError) as error:
        raise CommError(
            _why_not_met(url, topology, time.monotonic() - start, error)
        ) from error
    found.set_timeout(within)
    dist.init_process_group(
        settings.backend or _backend(device),
        store=notes,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=settings.timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    serves = rank == 0 and not _served_by_launcher()
    atexit.register(_leave, rank, size, serves, os.getpid())


def _leave(rank: int, size: int, serves: bool, pid: int) -> None:
    """Destroy the group at exit; the rank that serves the store waits a limited time until the others have finished.

    The others may still have to read its last messages, such as the completion of a barrier.
    """
    if os.getpid() != pid:  # in a fork of the rank
        return
    notes = _get_default_store() if dist.is_initialized() else None
    stop()
    if notes is None:
        return
    # losing this message is harmless, and a killed rank cannot send it
    with suppress(*store.LOST):
        if not serves:
            notes.set(f"hasten/left/{rank}", "1")
        # after an error this rank exits without waiting
        elif getattr(sys, "last_value", None) is None:
            notes.wait([f"hasten/left/{other}" for other in range(1, size)], _LINGER)


def _why_not_met(
    url: str,
    topology: Topology,
    elapsed_s: float,
    error: BaseException,
) -> str:
    who, reason = (
        f"rank {topology.rank} of {topology.world_size}",
        str(error).strip().partition("\n")[0],
    )
    if "EADDRINUSE" in str(error) or "already in use" in str(error):
        return (
            f"{who} cannot serve the meeting at {url}: another program uses this port, often a run that is still alive. Without it "
            f"the ranks do not find each other; end that program, or choose another MASTER_PORT (--main_process_port) on every rank."
        )
    return (
        f"{who} did not meet the others at {url} within {elapsed_s:.0f} s ({reason}). Without all ranks there is no "
        f"group to train in; check that every rank is started, that the address can be reached and that the port is free."
    )


def _meet(
    url: str, topology: Topology, within: timedelta
) -> tuple[dist.Store, int, int]:
    """Return the rendezvous store, rank and world size; rank 0 serves the store only on the address's interface."""
    place = urlsplit(url)
    if place.scheme == "tcp" and place.hostname and place.port is not None:
        if (
            store.is_loopback(place.hostname)
            and (name := store.loopback_interface()) is not None
        ):
            # every rank is on this machine: use only the loopback
            env.put_default("GLOO_SOCKET_IFNAME", name)
            env.put_default("NCCL_SOCKET_IFNAME", name)
        serves = topology.is_main and not place.query and not _served_by_launcher()
        if serves and place.port:
            try:
                return (
                    store.serve(place.hostname, place.port, within),
                    topology.rank,
                    topology.world_size,
                )
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                # this process may already serve a store there, which torch finds and shares
    found: tuple[dist.Store, int, int] = next(
        dist.rendezvous(url, topology.rank, topology.world_size, timeout=within)
    )
    return found


def _served_by_launcher() -> bool:
    """Return whether the store belongs to a process that outlives the ranks."""
    return "TORCHELASTIC_USE_AGENT_STORE" in env.snapshot()


def _backend(device: torch.device) -> str:
    kind = kind_of(device)
    if kind.backend is None:
        raise DeviceError(
            f"several processes were started on {device.type!r}, which has no collective library in this torch; run "
            "one process, or use the CPU (cpu=True, or `hasten launch --cpu`)."
        )
    return "gloo" if kind.backend == "gloo" else f"cpu:gloo,{kind.type}:{kind.backend}"
