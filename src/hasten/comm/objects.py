"""Collectives on objects, built on those on tensors: sealed by the group's session, in one message if they are small."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from hasten.comm.base import Comm
from hasten.comm.session import Credentials, Session, agree
from hasten.errors import CommError

# Any in this file: the caller's objects.
_FIRST: Final = 512  # bytes of the first message: a length, and the object itself if it fits
_LENGTH: Final = 8


class Objects:
    """Object collectives of one group, whose session is created by the first of them."""

    def __init__(self, comm: Comm, credentials: Credentials) -> None:
        self._comm = comm
        self._credentials = credentials
        self._session: Session | None = None
        self._turn = 0

    def session(self) -> Session:
        """Return the group's session. Ranks: every rank at the first call."""
        if self._session is None:
            comm = self._comm
            self._session = agree(self._exchange, comm.ranks, comm.rank, self._credentials)
        return self._session

    def all_gather(self, obj: Any) -> list[Any]:
        """Return every member's object. An object that cannot be sent raises on every member."""
        session, turn = self.session(), self._next()
        message, fault = self._message(obj, session, turn)
        firsts = self._comm.all_gather(_first(message))
        lengths = [_length(first) for first in firsts]
        rests: Tensor | None = None
        if (longest := max(lengths)) > _FIRST - _LENGTH:
            rests = self._comm.all_gather(_rest(message, longest))
        if fault is not None:
            raise fault
        return [
            session.open(_whole(first, None if rests is None else rests[i], lengths[i]), f"{turn}/{i}")
            for i, first in enumerate(firsts)
        ]

    def broadcast(self, obj: Any, src: int) -> Any:
        """Return the object of member `src`. An object that cannot be sent raises on every member."""
        session, turn = self.session(), self._next()
        message, fault = self._message(obj, session, turn) if self._comm.rank == src else (b"", None)
        first = self._comm.broadcast(_first(message), src)
        length = _length(first)
        rest = self._comm.broadcast(_rest(message, length), src) if length > _FIRST - _LENGTH else None
        if fault is not None:
            raise fault
        return session.open(_whole(first, rest, length), f"{turn}/{src}")

    def _message(self, obj: Any, session: Session, turn: int) -> tuple[bytes, CommError | None]:
        label = f"{turn}/{self._comm.rank}"
        try:
            return session.seal(session.pack(obj), label), None
        except CommError as error:  # the others wait: they get the error in place of the object
            return session.seal(session.refusal(error), label), error

    def _next(self) -> int:
        self._turn += 1
        return self._turn

    def _exchange(self, data: bytes) -> list[bytes]:
        return [row.numpy().tobytes() for row in self._comm.all_gather(_tensor(data))]


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _first(message: bytes) -> Tensor:
    room = _FIRST - _LENGTH
    return _tensor(len(message).to_bytes(_LENGTH, "little") + message[:room].ljust(room, b"\0"))


def _rest(message: bytes, longest: int) -> Tensor:
    """Return the bytes that did not fit into the first message, padded to the longest of all members."""
    room = _FIRST - _LENGTH
    buffer = torch.zeros(longest - room, dtype=torch.uint8)
    if len(message) > room:
        buffer[: len(message) - room] = _tensor(message[room:])
    return buffer


def _length(first: Tensor) -> int:
    length = int.from_bytes(first[:_LENGTH].numpy().tobytes(), "little")
    if length >= 1 << 48:
        raise CommError(
            f"another rank announced an object of {length} bytes: the message is damaged, or not a rank's. Run again; if it "
            f"happens once more, look for another program that uses this job's ports."
        )
    return length


def _whole(first: Tensor, rest: Tensor | None, length: int) -> memoryview:
    room = _FIRST - _LENGTH
    if length <= room or rest is None:
        return memoryview(first[_LENGTH : _LENGTH + length].numpy().tobytes())
    return memoryview(torch.cat([first[_LENGTH:], rest[: length - room]]).numpy().tobytes())
