"""Coordination of replicas through torchft's lighthouse: heartbeats, and the members of each update."""

from __future__ import annotations

import atexit
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Final

from hasten.errors import CommError
from hasten.extensions.survive.roles_plan import Member, divide_members
from hasten.extensions.survive.settings import SurviveSettings
from hasten.optional import need

log = logging.getLogger(__name__)

TORCHFT_PURPOSE: Final = "runs that continue when a replica is lost (survive)"
TORCHFT_VERSIONS: Final = ">=0.2,<0.3"
_HEARTBEATS_PER_TIMEOUT: Final = 8
"""Heartbeats in the time after which a silent replica counts as lost."""
_FIRST_REPORT_S: Final = 5.0
"""Seconds after which a wait for other replicas is reported for the first time."""
_REPORT_INTERVAL_S: Final = 30.0
"""Seconds between further reports of a wait, and after which a request to the lighthouse is repeated."""
_CLOSE_TIMEOUT_S: Final = 2.0
"""Seconds for which a replica that leaves waits for its latest messages to the lighthouse."""


class Quorum:
    """The members of an update, as the lighthouse has told all of them."""

    __slots__ = ("key", "members", "roles")

    def __init__(self, quorum_key: str, members: tuple[Member, ...]) -> None:
        self.key = quorum_key
        """Different for every answer of the lighthouse, and equal on all members."""
        self.members = members
        self.roles = divide_members(members)

    def to_json(self) -> dict[str, Any]:
        """Return the quorum as JSON values."""
        return {"key": self.key, "members": self.members}

    @classmethod
    def from_json(cls, decision: Mapping[str, Any]) -> Quorum:
        """Return the quorum that `encoded` has described."""
        return cls(
            decision["key"],
            tuple(Member(*member_fields) for member_fields in decision["members"]),
        )


class Coordinator:
    """Client of the lighthouse: sends heartbeats in one thread, and asks for quorums in another."""

    def __init__(
        self,
        settings: SurviveSettings,
        describe_replica: Callable[[], Member],
        ranks_are_alive: Callable[[], bool],
    ) -> None:
        """`alive` returns False while a rank of this replica is silent: the replica then sends no heartbeats."""
        torchft = need("torchft.coordination", TORCHFT_VERSIONS, TORCHFT_PURPOSE)
        self._settings = settings
        self._describe_replica = describe_replica
        self._ranks_are_alive = ranks_are_alive
        self._address = to_url(settings.lighthouse or "")
        self._connect_s = timedelta(seconds=settings.timeout_s)
        self._client = self._connect_client(torchft)
        self._torchft = torchft
        self._requests: queue.SimpleQueue[tuple[Member, Future[Quorum]] | None] = (
            queue.SimpleQueue()
        )
        self._closed = threading.Event()
        self._last_ask_s = time.monotonic()
        self._threads = [
            threading.Thread(
                target=self._send_heartbeats,
                name="hasten-survive-heartbeat",
                daemon=True,
            ),
            threading.Thread(
                target=self._serve_requests, name="hasten-survive-quorum", daemon=True
            ),
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    def _connect_client(self, torchft: Any) -> Any:  # Any: torchft's client
        try:
            return torchft.LighthouseClient(self._address, self._connect_s)
        # torchft raises plain RuntimeError and others: all of them mean the same here
        except Exception as error:
            raise CommError(
                f"the lighthouse at {self._address} cannot be reached ({error}), so this replica does not know the others. Start it with "
                "`hasten launch --replicas`, or check survive.lighthouse."
            ) from error

    def ask_for_quorum(self) -> Future[Quorum]:
        """Ask for the members of the next update; the answer comes when all live replicas have asked."""
        quorum_future: Future[Quorum] = Future()
        self._last_ask_s = time.monotonic()
        self._requests.put((self._describe_replica(), quorum_future))
        return quorum_future

    def wait_for_quorum(self, quorum_future: Future[Quorum]) -> Quorum:
        """Return the quorum when it has formed; reports a long wait. Raises: CommError when the lighthouse cannot be reached."""
        began_s = time.monotonic()
        report_due_s = _FIRST_REPORT_S
        while True:
            try:
                # slices, so that signals of the process are handled
                return quorum_future.result(1.0)
            except TimeoutError:
                waited_s = time.monotonic() - began_s
            if waited_s >= report_due_s:
                report_due_s = waited_s + _REPORT_INTERVAL_S
                log.warning(
                    "survive: replica %s waits for the others since %.0f s: fewer than min_replicas=%d are there, or one is slow",
                    *(self._settings.replica, waited_s, self._settings.min_replicas),
                )

    def close(self) -> None:
        """Leave the run: stop the heartbeats, so that the others do not wait for this replica."""
        atexit.unregister(self.close)
        self._closed.set()
        self._requests.put(None)
        for thread in self._threads:
            # Python that ends while a thread is inside torchft's client aborts the process
            thread.join(_CLOSE_TIMEOUT_S)

    def _send_heartbeats(self) -> None:
        client = self._connect_client(
            self._torchft
        )  # a client serves one call at a time
        interval_s = self._settings.heartbeat_timeout_s / _HEARTBEATS_PER_TIMEOUT
        replica_name = self._describe_replica().name
        while not self._closed.wait(interval_s):
            if (
                time.monotonic() - self._last_ask_s > self._settings.hang_timeout_s
                or not self._ranks_are_alive()
            ):
                # the loop hangs, or a rank is away: the others must not wait for this replica any longer
                continue
            try:
                client.heartbeat(
                    replica_name, timedelta(seconds=self._settings.heartbeat_timeout_s)
                )
            # the lighthouse may be away for a moment: the next heartbeat tells
            except Exception as error:
                log.debug("survive: a heartbeat was lost: %s", error)

    def _serve_requests(self) -> None:
        while (quorum_request := self._requests.get()) is not None:
            own_member, quorum_future = quorum_request
            try:
                quorum_future.set_result(self._request_quorum(own_member))
            # delivered to the waiting thread, which raises it
            except Exception as error:
                quorum_future.set_exception(error)

    def _request_quorum(self, own_member: Member) -> Quorum:
        num_failures = 0
        while True:
            try:
                torchft_quorum = self._client.quorum(
                    own_member.name,
                    timedelta(seconds=_REPORT_INTERVAL_S),
                    address=own_member.heal,
                    store_address=own_member.store,
                    step=own_member.step,
                    world_size=1,
                    shrink_only=False,
                    data={"lineage": own_member.lineage, "fresh": own_member.fresh},
                )
            except TimeoutError:
                # it waits for the others: its loop does not hang
                num_failures = 0
                self._last_ask_s = time.monotonic()
            # torchft raises plain RuntimeError: the connection or the lighthouse is gone
            except Exception as error:
                num_failures += 1
                if (
                    self._closed.is_set()
                    or num_failures * 0.5 > self._settings.timeout_s
                ):
                    raise CommError(
                        f"the lighthouse at {self._address} does not respond ({error}), so replica {own_member.name} cannot know which replicas "
                        "are left and does not continue. Start the lighthouse again, then this replica."
                    ) from error
                time.sleep(0.5)
            else:
                return _convert_quorum(torchft_quorum)


def _convert_quorum(torchft_quorum: Any) -> Quorum:  # Any: torchft's Quorum
    members = []
    for participant in torchft_quorum.participants:
        data = participant.data or {}
        member = Member(
            participant.replica_id,
            participant.step,
            str(data.get("lineage", "")),
            bool(data.get("fresh", False)),
            participant.store_address,
            participant.address,
        )
        members.append(member)
    creation_time = torchft_quorum.created
    return Quorum(
        f"{torchft_quorum.quorum_id}-{creation_time.seconds}-{creation_time.nanos}",
        tuple(members),
    )


def to_url(host_and_port: str) -> str:
    """Return the lighthouse's address as a URL."""
    return host_and_port if "://" in host_and_port else f"http://{host_and_port}"


def find_local_address(lighthouse: str) -> str:
    """Return the address of this machine that the lighthouse's machine can reach."""
    host, _, port = to_url(lighthouse).partition("://")[2].rstrip("/").rpartition(":")
    host = host.strip("[]")
    address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(address_family, socket.SOCK_DGRAM) as probe:
        try:
            # sends nothing: it only chooses the interface
            probe.connect((host, int(port)))
        except OSError as error:
            raise CommError(
                f"the lighthouse's address {lighthouse} cannot be resolved ({error}), so the other replicas cannot be told where this one is. "
                "Give survive.lighthouse as host:port."
            ) from error
        return str(probe.getsockname()[0])
