"""The ranks of one replica: decisions of the first rank, votes of all, and their heartbeats to the first."""

from __future__ import annotations

import hmac
import json
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from hasten.comm.base import Comm
from hasten.errors import CommError
from hasten.extensions.survive.healing import connected, digest, read
from hasten.extensions.survive.settings import SurviveSettings

_BEATS: Final = 8
"""Heartbeats of a rank in the time after which a silent replica counts as lost."""
_HELLO: Final = struct.Struct("!I32s")
"""A rank, and the digest of the job's token for it."""
_LENGTH: Final = struct.Struct("!I")
_MOST_BEATS: Final = 4096
"""Bytes that are read at once from a rank's heartbeats."""


class Inside:
    """The ranks of this replica. The first one talks to the lighthouse and decides; the others follow it.

    Decisions are sent over one connection to each rank, because a wait for other replicas may take any time; heartbeats come back over
    it. Votes are collectives of a separate gloo group.
    """

    def __init__(
        self, world: Comm, host: str, settings: SurviveSettings, token: bytes | None
    ) -> None:
        """Connect the ranks. Ranks: every rank of the replica."""
        self.rank, self.size = world.rank, world.size
        self._store = (
            dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            if self.rank == 0
            else None
        )
        own = None if self._store is None else f"{host}:{self._store.port}"
        self.address: str = world.broadcast_object(own)
        """host:port of the first rank's store, at which replicas form the groups of their exchange."""
        self._settings = settings
        self._token = token
        self._closed = threading.Event()
        self._links: dict[int, socket.socket] = {}
        """The connections to the other ranks on the first one, and to the first on the others."""
        self._heard_at: dict[int, float] = {}
        # Any: torch's stubs leave the collectives of this class out
        self._group: Any = None
        if self.size > 1:
            self._meet(world, host)
            timeout = timedelta(seconds=settings.hang_timeout_s)
            store = dist.PrefixStore("inside", _client(self.address))
            self._group = dist.ProcessGroupGloo(store, self.rank, self.size, timeout)

    def _meet(self, world: Comm, host: str) -> None:
        """Connect the first rank with each of the others."""
        if self.rank > 0:
            address: str = world.broadcast_object(None)
            link = self._links[0] = connected(address, self._settings.timeout_s)
            link.settimeout(None)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.sendall(_HELLO.pack(self.rank, self._proof(self.rank)))
            threading.Thread(
                target=self._beat, name="hasten-survive-rank-heartbeat", daemon=True
            ).start()
            return
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server(
            (host, 0), family=family, backlog=self.size
        ) as server:
            world.broadcast_object(f"{host}:{server.getsockname()[1]}")
            server.settimeout(self._settings.hang_timeout_s)
            while len(self._links) < self.size - 1:
                link, _ = server.accept()
                self._accept(link)

    def _accept(self, link: socket.socket) -> None:
        """Keep the connection of another rank of this job; close any other one."""
        link.settimeout(self._settings.timeout_s)
        try:
            rank, proof = _HELLO.unpack(read(link, _HELLO.size))
        except (OSError, EOFError):  # not a rank
            link.close()
            return
        if not 0 < rank < self.size or not hmac.compare_digest(
            proof, self._proof(rank)
        ):
            link.close()
            return
        link.settimeout(None)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._links[rank], self._heard_at[rank] = link, time.monotonic()

    def _proof(self, rank: int) -> bytes:
        return digest(self._token, f"{self.address} rank {rank}")

    @property
    def first(self) -> bool:
        """True on the rank that decides for the replica."""
        return self.rank == 0

    def tell(self, decision: dict[str, Any]) -> None:
        """Send a decision of the first rank to the others. Ranks: the first. Raises: CommError when one of them is lost."""
        content = json.dumps(decision).encode()
        try:
            for link in self._links.values():
                link.sendall(_LENGTH.pack(len(content)) + content)
        except OSError as error:
            raise self._lost(error) from error

    def hear(self) -> dict[str, Any]:
        """Return the next decision of the first rank; waits for it without limit. Ranks: all but the first.

        Raises: CommError when the first rank is lost.
        """
        link = self._links[0]
        try:
            (size,) = _LENGTH.unpack(read(link, _LENGTH.size))
            decision: dict[str, Any] = json.loads(read(link, size))
        except (OSError, EOFError) as error:
            raise self._lost(error) from error
        return decision

    def vote(self, success: bool) -> bool:
        """Return True if all ranks of this replica give True. Ranks: every rank. Raises: CommError when one is lost."""
        return self.total(not success) == 0.0

    def total(self, value: float) -> float:
        """Return the sum of the value over the ranks of this replica. Ranks: every rank. Raises: CommError when one is lost."""
        if self.size == 1:
            return value
        tensor = torch.tensor([float(value)], dtype=torch.float64)
        try:
            self._group.allreduce([tensor]).wait()
        except RuntimeError as error:
            raise self._lost(error) from error
        return float(tensor)

    def _lost(self, error: Exception) -> CommError:
        first = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        return CommError(
            f"another of the {self.size} ranks of this replica is lost ({first}), and a replica trains with all of its ranks or not at all. Nothing "
            "has to be done under `hasten launch --replicas`, which starts the replica again; look for the error of the other rank."
        )

    # -- heartbeats --------------------------------------------------------------------------------------------------
    def _beat(self) -> None:
        # the first rank is lost: the training thread meets it as well
        with suppress(OSError):
            while not self._closed.wait(self._settings.heartbeat_timeout_s / _BEATS):
                self._links[0].sendall(b".")

    def alive(self) -> bool:
        """Return False if another rank of this replica has been silent for half of the time after which the replica counts as lost.

        Ranks: the first, from one thread.
        """
        now = time.monotonic()
        for rank, link in self._links.items():
            # nothing has come, or the rank is lost: then it stays silent
            with suppress(OSError):
                if link.recv(_MOST_BEATS, socket.MSG_DONTWAIT):
                    self._heard_at[rank] = now
        return all(
            now - since <= self._settings.heartbeat_timeout_s / 2
            for since in self._heard_at.values()
        )

    def close(self) -> None:
        """Stop the heartbeats and close the connections."""
        self._closed.set()
        for link in self._links.values():
            link.close()
        self._group = None  # its destructor closes them


def _client(address: str) -> dist.TCPStore:
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False)


def of_rank(addresses: str, rank: int) -> str:
    """Return the address of this rank from the joined ones of a replica."""
    return addresses.split(",")[rank]


def joined(addresses: Sequence[str]) -> str:
    """Return the addresses of a replica's ranks as one text, for the lighthouse."""
    return ",".join(addresses)
