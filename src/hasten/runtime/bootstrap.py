"""Start of the process group, and creation of the ProcessContext."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import functools
import gc
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, suppress
from datetime import timedelta
from typing import Final
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import DistError, Store, TCPStore
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
from hasten.runtime.store import join
from hasten.runtime.topology import Topology

log = get_logger(__name__)
_LEAST: Final = (5, 5)


def warn_of_old_kernel() -> None:
    """Log a warning, on the main process, if this machine has a Linux kernel before 5.5."""
    version = os.uname().release if sys.platform == "linux" else ""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < _LEAST:
        log.warning(
            "Detected kernel version %s, which is below the recommended minimum of 5.5.0; this can cause the process to "
            "hang. It is recommended to upgrade the kernel to the minimum version or higher.",
            version,
        )


_FINE: Final = "fine"
_LONGEST_PAUSE_S: Final = 0.5
_LOOK_S: Final = 1.0

Ended = Callable[[], Mapping[int, int]]
"""Exit codes of the ranks that have ended, as reported by the launcher."""


def call_roll(store: Store, rank: int, size: int, within: timedelta, ended: Ended = dict) -> None:
    """Wait until all ranks have registered in the store. Ranks: every rank.

    Raises: TopologyError on every registered rank when two ranks differ in the world size; PeerFailedError when a rank ended before
    registering; RuntimeError on timeout.
    """
    deadline = time.monotonic() + within.total_seconds()
    store.set(f"roll/{rank}", str(size))
    if rank == 0:
        store.set("roll", _answer(store, size, deadline, ended))
    _wait(store, "roll", deadline, ended, range(size))
    answer = store.get("roll").decode()
    if answer != _FINE:
        raise TopologyError(answer)


def _answer(store: Store, size: int, deadline: float, ended: Ended) -> str:
    """Return rank 0's answer to all ranks: agreement on the world size, or the rank that differs."""
    for other in range(1, size):
        _wait(store, f"roll/{other}", deadline, ended, range(other, size))
        told = int(store.get(f"roll/{other}"))
        if told != size:
            return (
                f"rank {other} was started with WORLD_SIZE={told} and rank 0 with WORLD_SIZE={size}, so they would wait for ranks that "
                "do not exist. Start all ranks of the job with the same number of processes and machines, and end what is left of "
                "other jobs that meet at this address."
            )
    return _FINE


def _wait(store: Store, key: str, deadline: float, ended: Ended, ranks: Collection[int]) -> None:
    """Wait for the key; raise if one of `ranks` has ended without registering."""
    started = looked = time.monotonic()
    while not store.check([key]):
        now = time.monotonic()
        if now > deadline:
            raise RuntimeError("not all ranks have come")
        if now - looked > _LOOK_S:
            looked = now
            gone = {rank: code for rank, code in ended().items() if rank in ranks}
            absent = {rank: code for rank, code in gone.items() if not store.check([f"roll/{rank}"])}
            if absent and not store.check([key]):
                raise PeerFailedError(_ended_words(absent))
        time.sleep(min(0.002 + 0.05 * (now - started), _LONGEST_PAUSE_S))


def _ended_words(codes: Mapping[int, int]) -> str:
    how = ", ".join(sorted({f"exit code {code}" for code in codes.values()}))
    return (
        f"{ranks_in_words(sorted(codes))} ended ({how}) before making an Accelerator, so the other ranks would wait for it in vain. Let "
        "every rank make the Accelerator before it may leave: look for a sys.exit or return that depends on the rank."
    )


plain_log = logging.getLogger(__name__)

_PRESENT_AFTER_S: Final = 1.0
_FIRST_WORD_S: Final = 5.0
_ANSWER: Final = timedelta(seconds=5)


@contextlib.contextmanager
def announced_waiting(url: str, topology: Topology, say: Callable[[str], None] = plain_log.warning) -> Iterator[None]:
    """Context manager around a wait for other ranks, which logs the missing ranks after five seconds and again later.

    A rank that has waited for a second registers in the store at `url`, over a separate connection: the main connection is blocked
    until the group is formed. The lowest registered rank logs the missing ranks; if rank 0, which serves the store, is missing,
    all other ranks do.
    """
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(url, topology, say, over), name="hasten-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * _ANSWER.total_seconds())


def _watch(url: str, topology: Topology, say: Callable[[str], None], over: threading.Event) -> None:
    start, next_word = time.monotonic(), _FIRST_WORD_S
    if over.wait(_PRESENT_AFTER_S):
        return
    notes: TCPStore | None = None
    while not over.wait(0.2):
        try:
            if notes is None and (notes := _connect(url)) is not None:
                notes.set(_key(topology, topology.rank), "")
            elapsed = time.monotonic() - start
            if elapsed < next_word:
                continue
            next_word *= 2
            words = _words(notes, topology)
        except (DistError, OSError):  # rank 0 has exited: torch reports that in the main thread
            notes = None
            continue
        if words and not over.is_set():
            say(f"rank {topology.rank} of {topology.world_size} waits for {words} at {url} ({elapsed:.0f} s)")


def _words(notes: TCPStore | None, topology: Topology) -> str:
    """Return the missing ranks; empty if a lower rank reports them, or none is missing."""
    if notes is None:
        return "the others" if topology.is_main else "rank 0"
    ranks = range(topology.world_size)
    missing = [rank for rank in ranks if not notes.check([_key(topology, rank)])]
    if any(rank not in missing for rank in range(topology.rank)):
        return ""
    return ranks_in_words(missing)


def _key(topology: Topology, rank: int) -> str:
    return f"hasten/{topology.restart_count}/waiting/{rank}"


def _connect(url: str) -> TCPStore | None:
    """Return a connection to the store at `url`; None if no store is served there yet."""
    place = urlsplit(url)
    if place.scheme != "tcp" or not place.hostname or not place.port:
        return None
    try:
        with closing(socket.create_connection((place.hostname, place.port), timeout=1.0)):
            pass
    except OSError:
        return None
    return join(place.hostname, place.port, _ANSWER)


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
        warn_of_old_kernel()
        with announced_waiting(settings.init_method or _url(topology), topology):
            _init(topology, device, settings)
    if dist.is_initialized() and dist.get_world_size() > 1:
        _freeze_garbage_of_forks()
        return _joined(_actual(topology), device, mesh_of, settings)
    mesh = mesh_of(1)
    world = LocalComm(device)
    return ProcessContext(topology, mesh, device, world, lambda *axes: world)  # along any axes it is alone


@functools.cache  # registered once; torch and Python have no way to remove the callback
def _freeze_garbage_of_forks() -> None:
    """Exclude inherited objects from garbage collection in every fork of this process, such as a loader's worker.

    A collection there could destroy a process group that is waiting for collection here: its destructor would join
    threads that a fork does not have, and never return.
    """
    os.register_at_fork(after_in_child=gc.freeze)


def _joined(topology: Topology, device: torch.device, mesh_of: MeshOf, settings: GroupSettings) -> ProcessContext:
    group = dist.group.WORLD
    assert group is not None, "torch.distributed is initialised, so it has a world group"
    notes = _get_default_store()  # the only access to the store of a group that was started by other code
    collectives = CollectiveRecord()
    world: Comm = ProcessGroupComm(group, notes, device, settings.timeout_s, settings.codec, collectives)
    mesh = mesh_of(topology.world_size)
    groups = Groups(mesh, topology.rank, world, notes, settings.timeout_s, settings.codec, collectives)
    return ProcessContext(topology, mesh, device, world, groups, collectives)


def _actual(topology: Topology) -> Topology:
    """Return the topology of the running process group, which takes precedence if other code started it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if (topology.rank, topology.world_size) == (rank, size):
        return topology
    return Topology(rank=rank, world_size=size, local_rank=rank, local_world_size=size)


def _init(topology: Topology, device: torch.device, settings: GroupSettings) -> None:
    url = settings.init_method or _url(topology)
    within, start = timedelta(seconds=settings.init_timeout_s), time.monotonic()
    try:
        found, rank, size = _meet(url, topology, within)
        notes = dist.PrefixStore(f"hasten/{topology.restart_count}", found)
        call_roll(notes, rank, size, within, lambda: launcher_files.ended_ranks(env.snapshot()))
    except (RuntimeError, ValueError, OSError) as error:
        raise CommError(_why_not_met(url, topology, settings, time.monotonic() - start, error)) from error
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
    with suppress(*store.LOST):  # losing this message is harmless, and a killed rank cannot send it
        if not serves:
            notes.set(f"hasten/left/{rank}", "1")
        elif getattr(sys, "last_value", None) is None:  # after an error this rank exits without waiting
            notes.wait([f"hasten/left/{other}" for other in range(1, size)], _LINGER)


def _why_not_met(url: str, topology: Topology, settings: GroupSettings, elapsed_s: float, error: BaseException) -> str:
    who, reason = f"rank {topology.rank} of {topology.world_size}", str(error).strip().partition("\n")[0]
    if "EADDRINUSE" in str(error) or "already in use" in str(error):
        return (
            f"{who} cannot serve the meeting at {url}: another program uses this port, often a run that is still alive. Without it "
            f"the ranks do not find each other; end that program, or choose another MASTER_PORT (--main_process_port) on every rank."
        )
    if elapsed_s < 0.9 * settings.init_timeout_s:
        return (
            f"{who} failed to meet the others at {url} after {elapsed_s:.0f} s ({reason}). Without all ranks there is no group to "
            f"train in; check that the address is right and can be reached, and that no other program uses the port."
        )
    return (
        f"{who} did not meet the others at {url} within {settings.init_timeout_s:g} s ({reason}). Without all ranks there is no "
        f"group to train in; check that every rank is started, that the address can be reached and that the port is free."
    )


def _meet(url: str, topology: Topology, within: timedelta) -> tuple[dist.Store, int, int]:
    """Return the rendezvous store, rank and world size; rank 0 serves the store only on the address's interface."""
    place = urlsplit(url)
    if place.scheme == "tcp" and place.hostname and place.port is not None:
        if store.is_loopback(place.hostname) and (name := store.loopback_interface()) is not None:
            env.put_default("GLOO_SOCKET_IFNAME", name)  # every rank is on this machine: use only the loopback
            env.put_default("NCCL_SOCKET_IFNAME", name)
        serves = topology.is_main and not place.query and not _served_by_launcher()
        if serves and place.port:
            size = topology.world_size
            try:
                return store.serve(place.hostname, place.port, within, world_size=size), topology.rank, size
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                # this process may already serve a store there, which torch finds and shares
    found: tuple[dist.Store, int, int] = next(dist.rendezvous(url, topology.rank, topology.world_size, timeout=within))
    return found


def _served_by_launcher() -> bool:
    """Return whether the store belongs to a process that outlives the ranks."""
    return "TORCHELASTIC_USE_AGENT_STORE" in env.snapshot()


def _url(topology: Topology) -> str:
    if topology.rendezvous is None:
        raise TopologyError(
            f"rank {topology.rank} of {topology.world_size} does not know where to meet the others: neither "
            "MASTER_ADDR and MASTER_PORT nor a cluster's variables are set. Start the script with `hasten launch`, "
            "or set MASTER_ADDR and MASTER_PORT on every rank."
        )
    return topology.rendezvous if "://" in topology.rendezvous else f"tcp://{topology.rendezvous}"


def _backend(device: torch.device) -> str:
    kind = kind_of(device)
    if kind.backend is None:
        raise DeviceError(
            f"several processes were started on {device.type!r}, which has no collective library in this torch; run "
            "one process, or use the CPU (cpu=True, or `hasten launch --cpu`)."
        )
    return "gloo" if kind.backend == "gloo" else f"cpu:gloo,{kind.type}:{kind.backend}"
