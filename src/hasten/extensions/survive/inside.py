"""The ranks of one replica: decisions of the first rank, votes of all, and their heartbeats to the first."""

from __future__ import annotations

import json
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
from hasten.extensions.survive.settings import SurviveSettings

_HEARTBEATS_PER_TIMEOUT: Final = 8
"""Heartbeats of a rank in the time after which a silent replica counts as lost."""
_PAST_DECISIONS: Final = 64
"""Decisions that stay in the store for ranks that are behind."""
_MAX_STORE_WAIT: Final = timedelta(seconds=1)
"""Longest time in the store's client, during which no signal is handled."""


class Inside:
    """The ranks of this replica. The first one talks to the lighthouse and decides; the others follow it.

    Decisions and heartbeats are entries of a store on the first rank, because a wait for other replicas may take any time. Votes are
    collectives of a separate gloo group.
    """

    def __init__(self, world: Comm, host: str, settings: SurviveSettings) -> None:
        """Connect the ranks. Ranks: every rank of the replica."""
        self.rank = world.rank
        self.size = world.size
        if self.rank == 0:
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            self.address: str = world.broadcast_object(f"{host}:{self._store.port}")
        else:
            self.address = world.broadcast_object(None)
            self._store = _connect_to_store(self.address)
        self._settings = settings
        self._closed = threading.Event()
        self._num_decisions = 0
        self._heartbeats: dict[int, tuple[bytes, float]] = {}
        """The latest heartbeat of each other rank, and the time at which it was seen first."""
        # Any: torch's stubs leave the collectives of this class out
        self._group: Any = None
        if self.size > 1:
            timeout = timedelta(seconds=settings.hang_timeout_s)
            group_store = dist.PrefixStore("inside", _connect_to_store(self.address))
            self._group = dist.ProcessGroupGloo(
                group_store, self.rank, self.size, timeout
            )
        if self.rank > 0:
            threading.Thread(
                target=self._send_heartbeats,
                name="hasten-survive-rank-heartbeat",
                daemon=True,
            ).start()

    @property
    def is_first(self) -> bool:
        """True on the rank that decides for the replica."""
        return self.rank == 0

    def send_decision(self, decision: dict[str, Any]) -> None:
        """Send a decision of the first rank to the others. Ranks: the first."""
        if self.size > 1:
            self._store.set(f"decision {self._num_decisions}", json.dumps(decision))
            self._store.delete_key(f"decision {self._num_decisions - _PAST_DECISIONS}")
            self._num_decisions += 1

    def receive_decision(self) -> dict[str, Any]:
        """Return the next decision of the first rank; waits for it without limit. Ranks: all but the first.

        Raises: CommError when the first rank is lost.
        """
        decision_key = f"decision {self._num_decisions}"
        while True:
            try:
                self._store.wait([decision_key], _MAX_STORE_WAIT)
                decision: dict[str, Any] = json.loads(self._store.get(decision_key))
            except dist.DistStoreError:  # the time is up
                continue
            except RuntimeError as error:
                raise self._make_loss_error(error) from error
            self._num_decisions += 1
            return decision

    def vote(self, success: bool) -> bool:
        """Return True if all ranks of this replica give True. Ranks: every rank. Raises: CommError when one is lost."""
        return self.sum_over_ranks(not success) == 0.0

    def sum_over_ranks(self, local_value: float) -> float:
        """Return the sum of the value over the ranks of this replica. Ranks: every rank. Raises: CommError when one is lost."""
        if self.size == 1:
            return local_value
        tensor = torch.tensor([float(local_value)], dtype=torch.float64)
        try:
            self._group.allreduce([tensor]).wait()
        except RuntimeError as error:
            raise self._make_loss_error(error) from error
        return float(tensor)

    def _make_loss_error(self, error: Exception) -> CommError:
        if str(error):
            first_line = str(error).splitlines()[0][:200]
        else:
            first_line = type(error).__name__
        return CommError(
            f"another of the {self.size} ranks of this replica is lost ({first_line}), and a replica trains with all of its ranks or not at all. Nothing "
            "has to be done under `hasten launch --replicas`, which starts the replica again; look for the error of the other rank."
        )

    # -- heartbeats --------------------------------------------------------------------------------------------------
    def _send_heartbeats(self) -> None:
        interval_s = self._settings.heartbeat_timeout_s / _HEARTBEATS_PER_TIMEOUT
        # the first rank is lost: the training thread meets it as well
        with suppress(RuntimeError):
            heartbeat_store = _connect_to_store(
                self.address
            )  # a client serves one thread at a time
            heartbeat_number = 0
            while not self._closed.wait(interval_s):
                heartbeat_number += 1
                heartbeat_store.set(f"heartbeat {self.rank}", str(heartbeat_number))

    def has_live_ranks(self) -> bool:
        """Return False if another rank of this replica has been silent for half of the time after which the replica counts as lost.

        Ranks: the first, from one thread.
        """
        now_s = time.monotonic()
        limit_s = self._settings.heartbeat_timeout_s / 2
        for rank in range(1, self.size):
            heartbeat_key = f"heartbeat {rank}"
            if self._store.check([heartbeat_key]):
                heartbeat = self._store.get(heartbeat_key)
            else:
                heartbeat = b""
            if rank not in self._heartbeats or self._heartbeats[rank][0] != heartbeat:
                self._heartbeats[rank] = heartbeat, now_s
        return all(
            now_s - seen_at_s <= limit_s for _, seen_at_s in self._heartbeats.values()
        )

    def close(self) -> None:
        """Stop the heartbeats and close the connections."""
        self._closed.set()
        self._group = None  # its destructor closes them


def _connect_to_store(address: str) -> dist.TCPStore:
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False)


def address_of_rank(addresses: str, rank: int) -> str:
    """Return the address of this rank from the joined ones of a replica."""
    return addresses.split(",")[rank]


def join_addresses(addresses: Sequence[str]) -> str:
    """Return the addresses of a replica's ranks as one text, for the lighthouse."""
    return ",".join(addresses)
