"""Sessions: the members of a group prove that they know the job's token, and authenticate their messages with it.

The token itself is never sent. Each member sends a random number; these numbers and the token form the session's key; each
member then sends a keyed digest that only a holder of the token can compute. Every message carries such a digest, so bytes that
an outsider injects are refused before they are decoded.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import logging
import pickle
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import cloudpickle

from hasten.comm.encoding import NotPlain, decode, encode
from hasten.errors import CommError

log = logging.getLogger(__name__)

HELLO_BYTES: Final = 32
PROOF_BYTES: Final = 32
SEAL_BYTES: Final = 33
"""Bytes that sealing adds to a payload: a keyed digest of 32 bytes, and the kind."""

_PLAIN, _PICKLE, _REFUSAL = b"s", b"p", b"e"
_PICKLED_FAULTS: Final = (pickle.PicklingError, TypeError, ValueError, AttributeError, RecursionError, RuntimeError)
_REMEDY: Final = (
    "Start the job with `hasten launch`, or set HASTEN_TOKEN to the same random text of 16 characters or more on every machine "
    "(docs/security.md), or send plain data: numbers, text, lists, dicts, tensors."
)


@dataclass(frozen=True, slots=True)
class Credentials:
    """Token and pickle policy of a process that joins a group."""

    token: bytes | None = None
    required: bool = False
    """True if the token was set for this job: a member that cannot prove it is an error."""
    pickle_unproven: bool = False
    """Unpickle messages of members without a proven token, like torch's object collectives."""

    def __repr__(self) -> str:
        return f"Credentials(token={'set' if self.token else None}, required={self.required})"


@dataclass(frozen=True, slots=True)
class PackedObject:
    """An object as bytes: plain, pickled, or the text of its error."""

    kind: bytes
    payload: bytes


class Session:
    """Message authentication of one group. Without a proven token only plain values pass, unless pickles are allowed."""

    def __init__(self, key: bytes | None, pickle_unproven: bool = False) -> None:
        self._key = key
        self._pickles = key is not None or pickle_unproven

    @property
    def proven(self) -> bool:
        """True if every member has proven the token."""
        return self._key is not None

    def pack(self, obj: Any) -> PackedObject:  # Any: the caller's objects
        """Return the object as bytes: plain if possible, otherwise pickled if allowed.

        Raises: CommError if it cannot be sent.
        """
        try:
            return PackedObject(_PLAIN, encode(obj))
        except NotPlain as reason:
            if not self._pickles:
                raise CommError(
                    f"a {type(obj).__qualname__} cannot be sent as plain data ({reason}), and the ranks of this job share no "
                    f"token, so whoever reaches the network could send them pickled code. {_REMEDY}"
                ) from reason
        try:
            return PackedObject(_PICKLE, _pickled(obj))
        except _PICKLED_FAULTS as error:
            raise CommError(
                f"a {type(obj).__qualname__} cannot be sent to other ranks: {error}. Send what it is made of: numbers, text, "
                f"lists, dicts, tensors."
            ) from error

    def refusal(self, error: Exception) -> PackedObject:
        """Return the error in place of an object, so that the members waiting for it raise too."""
        return PackedObject(_REFUSAL, str(error).encode())

    def seal(self, packed: PackedObject, label: str) -> bytes:
        """Return the bytes to send; `label` identifies the message and its sender."""
        return self._digest(packed.kind, packed.payload, label) + packed.kind + packed.payload

    def open(self, message: bytes | memoryview, label: str) -> Any:  # Any: the sender's object
        """Return the object that was sealed with this label.

        Raises: CommError for a message that is not from a member, for a pickle without a proven token, and for the
        sender's error if it had one.
        """
        message = memoryview(message)
        digest, kind, payload = bytes(message[:32]), bytes(message[32:SEAL_BYTES]), message[SEAL_BYTES:]
        if self._key is not None and not hmac.compare_digest(digest, self._digest(kind, payload, label)):
            raise CommError(
                f"the message {label!r} ({len(message)} bytes) was not sealed by a member of this job: something else on the "
                f"network sent or changed it. Nothing of it was decoded. Keep the job's ports away from other users."
            )
        if kind == _PLAIN:
            return decode(payload)
        if kind == _REFUSAL:
            raise CommError(bytes(payload).decode(errors="replace"))
        if kind != _PICKLE or not self._pickles:
            raise CommError(f"the message {label!r} is pickled, which this job does not read. {_REMEDY}")
        return pickle.loads(payload)  # a member proved the job's token, or the user accepts pickles without one

    def _digest(self, kind: bytes, payload: bytes | memoryview, label: str) -> bytes:
        if self._key is None:
            return bytes(32)
        mac = hmac.new(self._key, f"{label}\0".encode() + kind, hashlib.sha256)
        mac.update(payload)
        return mac.digest()


def agree(exchange: Callable[[bytes], Sequence[bytes]], ranks: Sequence[int], rank: int, mine: Credentials) -> Session:
    """Create the session of a group whose members exchange bytes of equal length by `exchange`; `rank` counts in the group.

    Ranks: every member.
    Raises: CommError if a token was set for the job and a member does not prove it.
    """
    hello = secrets.token_bytes(HELLO_BYTES - 1) + bytes([mine.required and mine.token is not None])
    transcript = list(exchange(hello))
    key = _keyed(mine.token or secrets.token_bytes(32), "session", b"".join(transcript))
    proofs = exchange(_keyed(key, "proof", rank.to_bytes(8)) if mine.token else bytes(PROOF_BYTES))
    strangers = [
        ranks[i]
        for i, proof in enumerate(proofs)
        if not hmac.compare_digest(proof, _keyed(key, "proof", i.to_bytes(8)))
    ]
    own_hello = hmac.compare_digest(transcript[rank], hello)
    if mine.token and own_hello and not strangers:
        return Session(key)
    if mine.required or any(other[-1:] == b"\1" for other in transcript):
        who = "this rank has none" if mine.token is None else f"ranks {strangers} do not prove the one of this rank"
        raise CommError(
            f"rank {ranks[rank]}: the job's token (HASTEN_TOKEN) is not the same on all ranks: {who}. Without it a stranger on "
            f"the network could take a rank's place, so nothing was exchanged; set the same HASTEN_TOKEN on every machine."
        )
    log.info("the ranks share no token: objects travel as plain data only%s", _unless(mine.pickle_unproven))
    return Session(None, mine.pickle_unproven)


def _unless(pickles: bool) -> str:
    return ", or as unprotected pickles" if pickles else ""


def _keyed(key: bytes, purpose: str, data: bytes) -> bytes:
    return hmac.new(key, f"hasten {purpose}\0".encode() + data, hashlib.sha256).digest()


def _pickled(obj: Any) -> bytes:  # Any: the caller's objects
    try:
        buffer = io.BytesIO()
        pickle.Pickler(buffer, protocol=5).dump(obj)
        return buffer.getvalue()
    except (pickle.PicklingError, AttributeError, TypeError):  # classes of notebooks and functions go by value
        return bytes(cloudpickle.dumps(obj))
