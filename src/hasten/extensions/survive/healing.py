"""Transfer of a run's state from the memory of one replica to another, over one connection."""

from __future__ import annotations

import hmac
import io
import logging
import select
import socket
import struct
import sys
import time
from typing import Any, Final

import torch

from hasten.errors import HastenError

log = logging.getLogger(__name__)

_TRANSFER_HEADER: Final = struct.Struct("!32sQ")
"""Digest of the job's token, and the number of bytes that follow."""
_CHUNK_BYTES: Final = 1 << 20
_POLL_INTERVAL_S: Final = 0.1

RunStateDict = dict[str, Any]
"""Tensors and plain values. Any: state dicts of models, optimizers and schedulers."""


class NotHealedError(Exception):
    """Failure to receive a state: the sending replica is away."""


class HealingPort:
    """Listening socket at which this replica receives the state of another."""

    def __init__(self, host: str, token: bytes | None) -> None:
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server(
            (host, 0), family=address_family, backlog=16
        )
        self._token = token
        port = self._server.getsockname()[1]
        self.address = f"{host}:{port}"

    def receive(
        self, source_address: str, quorum_key: str, patience_s: float, timeout_s: float
    ) -> RunStateDict:
        """Return the state that the replica at `source` sends when it reaches the end of its update.

        `key` is that of the quorum in which the two were paired: a state that was sent for an earlier one, and waits here
        since, is refused, because the run has continued.

        Raises: NotHealedError when that replica is lost, or sends nothing for `patience_s` seconds.
        """
        try:
            witness = connect_to(
                source_address, timeout_s
            )  # closes when the other process ends
        except OSError as error:
            raise NotHealedError(
                f"{source_address} cannot be reached ({error})"
            ) from error
        with witness:
            _probe_connection(witness, timeout_s)
            deadline_s = time.monotonic() + patience_s
            while time.monotonic() < deadline_s:
                ready_sockets, _, _ = select.select(
                    [self._server, witness], [], [], _POLL_INTERVAL_S
                )
                if (
                    self._server in ready_sockets
                    and (state := self._accept_state(quorum_key, timeout_s)) is not None
                ):
                    return state
                if witness in ready_sockets and self._server not in ready_sockets:
                    raise NotHealedError(
                        f"{source_address} has closed its connection, or is cut off"
                    )
        raise NotHealedError(f"{source_address} sent nothing for {patience_s:.0f} s")

    def _accept_state(self, quorum_key: str, timeout_s: float) -> RunStateDict | None:
        """Return the state of the next connection; None for one that carries none."""
        connection, _ = self._server.accept()
        with connection:
            connection.settimeout(timeout_s)
            try:
                sender_digest, num_bytes = _TRANSFER_HEADER.unpack(
                    read_bytes(connection, _TRANSFER_HEADER.size)
                )
                if not hmac.compare_digest(
                    sender_digest, make_digest(self._token, quorum_key)
                ):
                    log.warning(
                        "survive: a state of an earlier update, or without this job's token, was refused"
                    )
                    return None
                packed_state = read_bytes(connection, num_bytes)
                connection.sendall(b"!")
            except (OSError, EOFError) as error:
                log.debug("survive: a transfer ended early: %s", error)
                return None
        # tensors and plain values only: nothing in the message is executed
        state: RunStateDict = torch.load(
            io.BytesIO(packed_state), map_location="cpu", weights_only=True
        )
        return state

    def close(self) -> None:
        """Stop to listen."""
        self._server.close()


def send_state(
    packed_state: bytes,
    address: str,
    token: bytes | None,
    quorum_key: str,
    timeout_s: float,
) -> None:
    """Send a packed state to the replica that listens at `address`, for the quorum `key`. Raises: OSError when it is away."""
    with connect_to(address, timeout_s) as connection:
        connection.sendall(
            _TRANSFER_HEADER.pack(make_digest(token, quorum_key), len(packed_state))
        )
        connection.sendall(packed_state)
        if connection.recv(1) != b"!":
            raise ConnectionError("the receiver has closed the connection")


def pack_state(state: RunStateDict) -> bytes:
    """Return the state as bytes. Raises: HastenError for values that are neither tensors nor plain."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    packed_state = buffer.getvalue()
    try:
        torch.load(io.BytesIO(packed_state), map_location="meta", weights_only=True)
    # torch raises pickle's errors: all mean that the receiver could not read it
    except Exception as error:
        raise HastenError(
            f"the state of this run holds objects that cannot be sent to another replica safely ({str(error).splitlines()[0]}), so a returning "
            "replica could not be healed. Keep tensors, numbers, texts, lists and dicts in the state dicts of optimizers and schedulers."
        ) from error
    return packed_state


def make_digest(token: bytes | None, quorum_key: str) -> bytes:
    """Return the digest that proves the knowledge of the job's token, for one quorum."""
    return hmac.digest(token or b"", f"hasten healing {quorum_key}".encode(), "sha256")


def connect_to(address: str, timeout_s: float) -> socket.socket:
    """Return a connection to host:port."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=timeout_s)


def _probe_connection(connection: socket.socket, timeout_s: float) -> None:
    """Let the system probe an idle connection, which ends when the other machine has not responded for about `timeout_s` seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(2, round(timeout_s))
        )


def read_bytes(connection: socket.socket, size: int) -> bytes:
    """Return this many bytes of a connection. Raises: EOFError when it ends before; OSError when it fails."""
    received_bytes = bytearray()
    while len(received_bytes) < size:
        chunk = connection.recv(min(_CHUNK_BYTES, size - len(received_bytes)))
        if not chunk:
            raise EOFError(f"{len(received_bytes)} of {size} bytes arrived")
        received_bytes += chunk
    return bytes(received_bytes)
