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
from hasten.extensions.survive.roles_plan import Member, divide
from hasten.extensions.survive.settings import SurviveSettings
from hasten.optional import need

log = logging.getLogger(__name__)

WHY: Final = "runs that continue when a replica is lost (survive)"
VERSIONS: Final = ">=0.2,<0.3"
_BEATS: Final = 8
"""Heartbeats in the time after which a silent replica counts as lost."""
_FIRST_S: Final = 5.0
"""Seconds after which a wait for other replicas is reported for the first time."""
_SLICE_S: Final = 30.0
"""Seconds between further reports of a wait, and after which a request to the lighthouse is repeated."""
_LEAVE_S: Final = 2.0
"""Seconds for which a replica that leaves waits for its latest messages to the lighthouse."""


class Quorum:
    """The members of an update, as the lighthouse has told all of them."""

    __slots__ = ("key", "members", "roles")

    def __init__(self, key: str, members: tuple[Member, ...]) -> None:
        self.key = key
        """Different for every answer of the lighthouse, and equal on all members."""
        self.members = members
        self.roles = divide(members)

    def encoded(self) -> dict[str, Any]:
        """Return the quorum as JSON values."""
        return {"key": self.key, "members": self.members}

    @classmethod
    def decoded(cls, values: Mapping[str, Any]) -> Quorum:
        """Return the quorum that `encoded` has described."""
        return cls(values["key"], tuple(Member(*one) for one in values["members"]))


class Coordinator:
    """Client of the lighthouse: sends heartbeats in one thread, and asks for quorums in another."""

    def __init__(
        self,
        settings: SurviveSettings,
        card: Callable[[], Member],
        alive: Callable[[], bool],
    ) -> None:
        """`alive` returns False while a rank of this replica is silent: the replica then sends no heartbeats."""
        torchft = need("torchft.coordination", VERSIONS, WHY)
        self._settings = settings
        self._card = card
        self._alive = alive
        self._address = with_scheme(settings.lighthouse or "")
        self._connect_s = timedelta(seconds=settings.timeout_s)
        self._client = self._connected(torchft)
        self._torchft = torchft
        self._requests: queue.SimpleQueue[tuple[Member, Future[Quorum]] | None] = (
            queue.SimpleQueue()
        )
        self._closed = threading.Event()
        self._asked_at = time.monotonic()
        self._threads = [
            threading.Thread(
                target=self._beat, name="hasten-survive-heartbeat", daemon=True
            ),
            threading.Thread(
                target=self._serve, name="hasten-survive-quorum", daemon=True
            ),
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    def _connected(self, torchft: Any) -> Any:  # Any: torchft's client
        try:
            return torchft.LighthouseClient(self._address, self._connect_s)
        # torchft raises plain RuntimeError and others: all of them mean the same here
        except Exception as error:
            raise CommError(
                f"the lighthouse at {self._address} cannot be reached ({error}), so this replica does not know the others. Start it with "
                "`hasten launch --replicas`, or check survive.lighthouse."
            ) from error

    def ask(self) -> Future[Quorum]:
        """Ask for the members of the next update; the answer comes when all live replicas have asked."""
        answer: Future[Quorum] = Future()
        self._asked_at = time.monotonic()
        self._requests.put((self._card(), answer))
        return answer

    def wait(self, answer: Future[Quorum]) -> Quorum:
        """Return the quorum when it has formed; reports a long wait. Raises: CommError when the lighthouse cannot be reached."""
        began, report_due_s = time.monotonic(), _FIRST_S
        while True:
            try:
                # slices, so that signals of the process are handled
                return answer.result(1.0)
            except TimeoutError:
                waited_s = time.monotonic() - began
            if waited_s >= report_due_s:
                report_due_s = waited_s + _SLICE_S
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
            thread.join(_LEAVE_S)

    def _beat(self) -> None:
        client = self._connected(self._torchft)  # a client serves one call at a time
        every = self._settings.heartbeat_timeout_s / _BEATS
        name = self._card().name
        while not self._closed.wait(every):
            if (
                time.monotonic() - self._asked_at > self._settings.hang_timeout_s
                or not self._alive()
            ):
                # the loop hangs, or a rank is away: the others must not wait for this replica any longer
                continue
            try:
                client.heartbeat(
                    name, timedelta(seconds=self._settings.heartbeat_timeout_s)
                )
            # the lighthouse may be away for a moment: the next heartbeat tells
            except Exception as error:
                log.debug("survive: a heartbeat was lost: %s", error)

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            card, answer = request
            try:
                answer.set_result(self._quorum(card))
            # delivered to the waiting thread, which raises it
            except Exception as error:
                answer.set_exception(error)

    def _quorum(self, card: Member) -> Quorum:
        failures = 0
        while True:
            try:
                found = self._client.quorum(
                    card.name,
                    timedelta(seconds=_SLICE_S),
                    address=card.heal,
                    store_address=card.store,
                    step=card.step,
                    world_size=1,
                    shrink_only=False,
                    data={"lineage": card.lineage, "fresh": card.fresh},
                )
            except TimeoutError:
                # it waits for the others: its loop does not hang
                failures, self._asked_at = 0, time.monotonic()
            # torchft raises plain RuntimeError: the connection or the lighthouse is gone
            except Exception as error:
                failures += 1
                if self._closed.is_set() or failures * 0.5 > self._settings.timeout_s:
                    raise CommError(
                        f"the lighthouse at {self._address} does not respond ({error}), so replica {card.name} cannot know which replicas "
                        "are left and does not continue. Start the lighthouse again, then this replica."
                    ) from error
                time.sleep(0.5)
            else:
                return _as_quorum(found)


def _as_quorum(found: Any) -> Quorum:  # Any: torchft's Quorum
    members = tuple(
        Member(
            one.replica_id,
            one.step,
            str((one.data or {}).get("lineage", "")),
            bool((one.data or {}).get("fresh", False)),
            one.store_address,
            one.address,
        )
        for one in found.participants
    )
    created = found.created
    return Quorum(f"{found.quorum_id}-{created.seconds}-{created.nanos}", members)


def with_scheme(address: str) -> str:
    """Return the lighthouse's address as a URL."""
    return address if "://" in address else f"http://{address}"


def local_address(lighthouse: str) -> str:
    """Return the address of this machine that the lighthouse's machine can reach."""
    host, _, port = (
        with_scheme(lighthouse).partition("://")[2].rstrip("/").rpartition(":")
    )
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # sends nothing: it only chooses the interface
            probe.connect((host, int(port)))
        except OSError as error:
            raise CommError(
                f"the lighthouse's address {lighthouse} cannot be resolved ({error}), so the other replicas cannot be told where this one is. "
                "Give survive.lighthouse as host:port."
            ) from error
        return str(probe.getsockname()[0])
