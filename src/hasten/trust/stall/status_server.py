"""Status server of a rank: answers processes of the same user on a local socket, in the watchdog's thread."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from hasten.errors import CommError
from hasten.runtime.topology import Topology
from hasten.trust.memory import process_memory
from hasten.trust.stall.job_sockets import (
    POST,
    Address,
    listening,
    peer_is_owner,
    private_folder,
    receive_line,
    request_post,
)
from hasten.trust.stall.observe import Observer

_KEPT: Final = 20
_WIDTH: Final = 300


class RecentLog:
    """Log record factory that records recent lines between `start` and `stop`."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=_KEPT)
        self._before = logging.getLogRecordFactory()

    def start(self) -> None:
        """Start recording lines."""
        self._before = logging.getLogRecordFactory()
        logging.setLogRecordFactory(self)

    def stop(self) -> None:
        """Remove this factory from the chain of record factories; behind a foreign factory it only stops recording."""
        self.lines = deque(maxlen=0)
        factory = logging.getLogRecordFactory()
        if factory is self:
            logging.setLogRecordFactory(self._before)
        while isinstance(factory, RecentLog):
            if factory._before is self:
                factory._before = self._before
                return
            factory = factory._before

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:  # Any: as in logging
        record = self._before(*args, **kwargs)
        try:
            text = record.getMessage().splitlines()
        except (TypeError, ValueError, KeyError, IndexError):  # a wrong format: reported by the handlers
            return record
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        self.lines.append(f"{stamp} {record.levelname} {record.name}: {text[0] if text else ''}"[:_WIDTH])
        return record


log = logging.getLogger(__name__)

_PATIENCE_S: Final = 0.5
_SPAN: Final = 30
"""Number of watchdog ticks over which a rate is computed: about as many seconds."""


class StatusServer:
    """Status socket of one rank. All methods but `open` and `close` run in the thread that calls `wait`."""

    def __init__(
        self,
        observer: Observer,
        topology: Topology,
        device: torch.device,
        folder: Path,
        rates: Callable[[], Mapping[str, float | str]] = dict,
    ) -> None:
        self._rates = rates
        self._observer = replace(observer)  # separate measurements: status requests must not affect the watchdog's
        self._topology = topology
        self._device = device
        self._folder = folder
        self._recent = RecentLog()
        self._began_s = time.time()
        self._steps: deque[tuple[float, int]] = deque(maxlen=_SPAN)
        self._socket: socket.socket | None = None
        self._path: Path | None = None
        self._wake_receiver: socket.socket | None = None
        self._wake_sender: socket.socket | None = None

    def open(self) -> None:
        """Start listening. Without a private folder no status is available, which is logged; the job still runs."""
        self._recent.start()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        try:
            folder = private_folder(self._folder)
            for number in range(1 << 10):
                path = folder / Address(os.getppid(), self._topology.rank, os.getpid(), number).name
                if not path.exists():
                    break
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket, self._path = made, path
            made.bind(str(path))
            path.chmod(0o600)
            made.listen(4)
        except (OSError, CommError) as error:
            log.info("`hasten top` cannot connect to this rank: %s", error)

    def wait(self, seconds: float) -> bool:
        """Wait for the given seconds or for `wake`, answering requests; return whether a post was requested."""
        now = time.monotonic()
        end = now + seconds
        self._steps.append((now, self._observer.step()))
        sources = [one for one in (self._wake_receiver, self._socket) if one is not None]
        while now < end:
            ready = wait_for(sources, end - now)  # not select(), which takes no descriptor above 1023
            if self._wake_receiver in ready:
                return False
            if ready and self._answer():
                return True
            now = time.monotonic()
        return False

    def ask_to_post(self, pids: Collection[int]) -> None:
        """Ask ranks of this machine to post their states."""
        for address, path in listening(self._folder):
            if address.pid in pids:
                request_post(path)

    def wake(self) -> None:
        """End a `wait` in another thread."""
        if self._wake_sender is not None:
            self._wake_sender.send(b"!")

    def close(self) -> None:
        """Stop listening and remove the socket."""
        self._recent.stop()
        for one in (self._socket, self._wake_receiver, self._wake_sender):
            if one is not None:
                one.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _answer(self) -> bool:
        """Answer one request; return whether it asks the watchdog to post."""
        assert self._socket is not None, "a client has connected"
        try:
            connection, _ = self._socket.accept()
            with connection:
                connection.settimeout(_PATIENCE_S)  # the watchdog continues even if the client sends nothing
                if peer_is_owner(connection):
                    request = msgspec.json.decode(receive_line(connection), type=dict[str, Any])
                    if request.get(POST):
                        return True
                    connection.sendall(msgspec.json.encode(self._status(bool(request.get("stacks")))) + b"\n")
        except (OSError, msgspec.DecodeError) as error:  # the client has disconnected, or sent an invalid request
            log.debug("the request was not answered: %s", error)
        return False

    def _status(self, stacks: bool) -> dict[str, Any]:  # Any: JSON values
        state = self._observer.look(0.0, {})
        return {
            "rank": state.rank,
            "world_size": self._topology.world_size,
            "host": state.host,
            "pid": state.pid,
            "script": Path(sys.argv[0]).name,
            "seconds": round(time.time() - self._began_s, 1),
            "step": state.step,
            "steps_per_s": self._rate(state.step),
            **self._rates(),
            "waits": state.waits and self._topology.world_size > 1,
            "doing": state.kind,
            "at": state.spot.words(),
            "memory": process_memory(self._device),
            "log": list(self._recent.lines),
            **({"stack": list(state.stack)} if stacks else {}),
        }

    def _rate(self, step: int) -> float | None:
        """Return the updates per second over the last half minute; None without an update."""
        if not self._steps or step == self._steps[0][1]:
            return None
        since, before = self._steps[0]
        return round((step - before) / max(time.monotonic() - since, 1e-3), 3)


_TICK_S: Final = 1.0


class StatusThread:
    """Status server thread of a process without watchdog. `start` and `close` are called by the training thread."""

    def __init__(self, status_server: StatusServer) -> None:
        self._status_server = status_server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hasten-status", daemon=True)

    def start(self) -> None:
        """Start answering requests."""
        self._status_server.open()
        self._thread.start()

    def close(self, ended: str = "", failed: bool = False) -> None:
        """Stop answering requests; `ended` and `failed` are ignored, as there are no other ranks."""
        if self._over.is_set():
            return
        self._over.set()
        self._status_server.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _TICK_S)
        self._status_server.close()

    def _run(self) -> None:
        while not self._over.is_set():
            self._status_server.wait(_TICK_S)
