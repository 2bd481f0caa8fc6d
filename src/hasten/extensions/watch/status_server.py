"""Status of a rank for `hasten top`: a thread that answers processes of the same user on a local socket."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from hasten.accelerator.components import Components
from hasten.errors import CommError
from hasten.extensions.watch.job_sockets import (
    Address,
    peer_is_owner,
    private_folder,
    receive_line,
)
from hasten.extensions.watch.observe import Observer
from hasten.optim.run_part import RunPart
from hasten.runtime import env
from hasten.runtime.topology import Topology
from hasten.trust.memory import process_memory

log = logging.getLogger(__name__)

_PATIENCE_S: Final = 0.5
_TICK_S: Final = 1.0
_SPAN: Final = 30
"""Number of ticks over which a rate is computed: about as many seconds."""


class StatusPart(RunPart):
    """Status server of a run that `hasten launch` has started; it ends with its Accelerator, at `end_training()`, or at exit."""

    def __init__(self) -> None:
        self._server: StatusServer | None = None

    def built(self, run: Components) -> None:
        """Start the server. Ranks: every rank."""
        # the thread must not keep the Accelerator alive
        accelerator = run.accelerator
        clocks = weakref.ref(run.clock)
        ctx = accelerator.ctx

        def count_updates() -> int:
            clock = clocks()
            return 0 if clock is None else clock.num_updates

        def read_values() -> Mapping[str, float | str]:
            clock = clocks()
            return {} if clock is None else clock.parts.read_status()

        observer = Observer(ctx.rank, ctx.collectives, count_updates, ctx.device.type)
        folder = env.runtime_folder(env.snapshot())
        self._server = server = StatusServer(
            observer, ctx.topology, ctx.device, folder, read_values
        )
        server.start()
        at_exit = partial(_close_server, weakref.ref(server))
        atexit.register(at_exit)
        weakref.finalize(accelerator, _forget_server, server, at_exit).atexit = False

    def end(self) -> None:
        """Stop the server."""
        if self._server is not None:
            self._server.close()


def _close_server(ref: weakref.ref[StatusServer]) -> None:
    if (server := ref()) is not None:
        server.close()


def _forget_server(server: StatusServer, at_exit: Callable[[], None]) -> None:
    atexit.unregister(at_exit)
    server.close()


class StatusServer:
    """Status socket of one rank. `start` and `close` are called by the training thread."""

    def __init__(
        self,
        observer: Observer,
        topology: Topology,
        device: torch.device,
        folder: Path,
        rates: Callable[[], Mapping[str, float | str]] = dict,
    ) -> None:
        self._rates = rates
        self._observer = observer
        self._topology = topology
        self._device = device
        self._folder = folder
        self._began_s = time.time()
        self._steps: deque[tuple[float, int]] = deque(maxlen=_SPAN)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._path: Path | None = None
        self._pid = os.getpid()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(
            target=self._answer_requests, name="hasten-status", daemon=True
        )

    def start(self) -> None:
        """Start answering requests. Without a private folder no status is available, which is logged; the job still runs."""
        try:
            folder = private_folder(self._folder)
            names = (
                Address(os.getppid(), self._topology.rank, os.getpid(), number).name
                for number in range(1 << 10)
            )
            socket_path = next(
                folder / name for name in names if not (folder / name).exists()
            )
            self._socket.bind(str(socket_path))
            self._path = socket_path
            socket_path.chmod(0o600)
            self._socket.listen(4)
        except (OSError, CommError) as error:
            log.info("`hasten top` cannot connect to this rank: %s", error)
            return
        self._socket.settimeout(_TICK_S)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and remove the socket."""
        if (
            self._is_closed.is_set() or os.getpid() != self._pid
        ):  # in a fork of the rank
            return
        self._is_closed.set()
        if self._thread.is_alive():
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the wait for a request
            self._thread.join(2 * _TICK_S)
        self._socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _answer_requests(self) -> None:
        while not self._is_closed.is_set():
            self._steps.append((time.monotonic(), self._observer.step()))
            try:
                connection, _ = self._socket.accept()
                with connection:
                    self._answer_request(connection)
            except TimeoutError:
                continue
            # the client has disconnected, or sent an invalid request
            except (OSError, msgspec.DecodeError) as error:
                log.debug("the request was not answered: %s", error)
                # without free file descriptors, accept() fails at once
                self._is_closed.wait(_PATIENCE_S)

    def _answer_request(self, connection: socket.socket) -> None:
        # the next client is answered even if this one sends nothing
        connection.settimeout(_PATIENCE_S)
        if peer_is_owner(connection):
            request = msgspec.json.decode(receive_line(connection), type=dict[str, Any])
            connection.sendall(
                msgspec.json.encode(self._describe_rank(bool(request.get("stacks"))))
                + b"\n"
            )

    def _describe_rank(self, stacks: bool) -> dict[str, Any]:  # Any: JSON values
        rank_state = self._observer.observe_thread(0.0, {})
        return {
            "rank": rank_state.rank,
            "world_size": self._topology.world_size,
            "host": rank_state.host,
            "pid": rank_state.pid,
            "script": Path(sys.argv[0]).name,
            "seconds": round(time.time() - self._began_s, 1),
            "step": rank_state.step,
            "steps_per_s": self._steps_per_s(rank_state.step),
            "values": dict(self._rates()),
            "waits": rank_state.waits and self._topology.world_size > 1,
            "doing": rank_state.kind,
            "at": rank_state.spot.describe_line(),
            "memory": process_memory(self._device),
            **({"stack": list(rank_state.stack)} if stacks else {}),
        }

    def _steps_per_s(self, step: int) -> float | None:
        """Return the updates per second over the last half minute; None without an update."""
        if not self._steps or step == self._steps[0][1]:
            return None
        since_s, steps_before = self._steps[0]
        return round((step - steps_before) / max(time.monotonic() - since_s, 1e-3), 3)
