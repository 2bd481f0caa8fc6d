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

_HEAD: Final = struct.Struct("!32sQ")
"""Digest of the job's token, and the number of bytes that follow."""
_CHUNK: Final = 1 << 20
_POLL_S: Final = 0.1

State = dict[str, Any]
"""Tensors and plain values. Any: state dicts of models, optimizers and schedulers."""


class NotHealedError(Exception):
    """Failure to receive a state: the sending replica is away."""


class HealingPort:
    """Listening socket at which this replica receives the state of another."""

    def __init__(self, host: str, token: bytes | None) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family, backlog=16)
        self._token = token
        port = self._server.getsockname()[1]
        self.address = f"{host}:{port}"

    def receive(
        self, source: str, key: str, patience_s: float, timeout_s: float
    ) -> State:
        """Return the state that the replica at `source` sends when it reaches the end of its update.

        `key` is that of the quorum in which the two were paired: a state that was sent for an earlier one, and waits here
        since, is refused, because the run has continued.

        Raises: NotHealedError when that replica is lost, or sends nothing for `patience_s` seconds.
        """
        try:
            witness = connected(source, timeout_s)  # closes when the other process ends
        except OSError as error:
            raise NotHealedError(f"{source} cannot be reached ({error})") from error
        with witness:
            _probe(witness, timeout_s)
            until = time.monotonic() + patience_s
            while time.monotonic() < until:
                ready, _, _ = select.select([self._server, witness], [], [], _POLL_S)
                if (
                    self._server in ready
                    and (state := self._accept(key, timeout_s)) is not None
                ):
                    return state
                if witness in ready and self._server not in ready:
                    raise NotHealedError(
                        f"{source} has closed its connection, or is cut off"
                    )
        raise NotHealedError(f"{source} sent nothing for {patience_s:.0f} s")

    def _accept(self, key: str, timeout_s: float) -> State | None:
        """Return the state of the next connection; None for one that carries none."""
        connection, _ = self._server.accept()
        with connection:
            connection.settimeout(timeout_s)
            try:
                theirs, size = _HEAD.unpack(read(connection, _HEAD.size))
                if not hmac.compare_digest(theirs, digest(self._token, key)):
                    log.warning(
                        "survive: a state of an earlier update, or without this job's token, was refused"
                    )
                    return None
                content = read(connection, size)
                connection.sendall(b"!")
            except (OSError, EOFError) as error:
                log.debug("survive: a transfer ended early: %s", error)
                return None
        # tensors and plain values only: nothing in the message is executed
        state: State = torch.load(
            io.BytesIO(content), map_location="cpu", weights_only=True
        )
        return state

    def close(self) -> None:
        """Stop to listen."""
        self._server.close()


def send(
    state: bytes, address: str, token: bytes | None, key: str, timeout_s: float
) -> None:
    """Send a packed state to the replica that listens at `address`, for the quorum `key`. Raises: OSError when it is away."""
    with connected(address, timeout_s) as connection:
        connection.sendall(_HEAD.pack(digest(token, key), len(state)))
        connection.sendall(state)
        if connection.recv(1) != b"!":
            raise ConnectionError("the receiver has closed the connection")


def pack(state: State) -> bytes:
    """Return the state as bytes. Raises: HastenError for values that are neither tensors nor plain."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    try:
        torch.load(io.BytesIO(content), map_location="meta", weights_only=True)
    # torch raises pickle's errors: all mean that the receiver could not read it
    except Exception as error:
        raise HastenError(
            f"the state of this run holds objects that cannot be sent to another replica safely ({str(error).splitlines()[0]}), so a returning "
            "replica could not be healed. Keep tensors, numbers, texts, lists and dicts in the state dicts of optimizers and schedulers."
        ) from error
    return content


def digest(token: bytes | None, key: str) -> bytes:
    """Return the digest that proves the knowledge of the job's token, for one quorum."""
    return hmac.digest(token or b"", f"hasten healing {key}".encode(), "sha256")


def connected(address: str, timeout_s: float) -> socket.socket:
    """Return a connection to host:port."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=timeout_s)


def _probe(connection: socket.socket, timeout_s: float) -> None:
    """Let the system probe an idle connection, which ends when the other machine has not responded for about `timeout_s` seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(2, round(timeout_s))
        )


def read(connection: socket.socket, size: int) -> bytes:
    """Return this many bytes of a connection. Raises: EOFError when it ends before; OSError when it fails."""
    content = bytearray()
    while len(content) < size:
        part = connection.recv(min(_CHUNK, size - len(content)))
        if not part:
            raise EOFError(f"{len(content)} of {size} bytes arrived")
        content += part
    return bytes(content)
