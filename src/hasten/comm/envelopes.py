"""Envelopes: the first exchange of every collective on trees, which also carries the tensors of small gathers.

An envelope is a header followed by space for tensors. The header holds a digest of the operation, the structure, the shapes and the
dtypes, the number of bytes of the tensors, and the sizes of a dimension that may differ between ranks. In one exchange all envelopes
have the same length, whatever each rank is about to do, so that ranks which call different operations can still report it. The length
is derived from earlier exchanges, which are the same on every rank: a gather that follows the same exchanges as before has enough space.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

HEADER: Final = struct.Struct("<16q")
NUM_SIZES: Final = 14
"""Largest number of sizes in a header."""
_SHORTEST: Final = 1024
_LONGEST: Final = 2 << 20
_LONGEST_OF_ALL: Final = 8 << 20
"""Largest number of bytes of all envelopes of an exchange; larger tensors are exchanged separately, without copies."""
_KEPT: Final = 256
"""Largest number of remembered situations and shapes."""
_KEPT_BYTES: Final = 16 << 20


class EnvelopeHead(NamedTuple):
    """Header of an envelope."""

    digest: int
    num_bytes: int
    """Bytes of the tensors; -1 if they cannot be sent in an envelope, such as tensors on an accelerator."""
    sizes: tuple[int, ...] = ()
    """Size of each tensor along the free dimension."""

    def packed(self) -> bytes:
        return HEADER.pack(self.digest, self.num_bytes, *self.sizes, *[0] * (NUM_SIZES - len(self.sizes)))


class Form(NamedTuple):
    """Reusable buffers for gathering tensors of one shape and dtype."""

    head: EnvelopeHead
    envelope: Tensor
    slot: Tensor
    """Slice of the envelope that holds the tensor."""
    header: memoryview
    """Header that every envelope must start with, as 16 numbers, which are compared faster than 128 bytes."""
    everyone: Tensor
    """Envelopes of all ranks: one buffer for all forms of this length."""
    headers: list[memoryview]
    """Headers of all ranks in `everyone`, as numbers."""
    parts: list[Tensor]
    """Tensors of all ranks in `everyone`."""


class Envelopes:
    """Envelopes of one process group: the length of the next one, and buffers for recurring shapes."""

    def __init__(self, num_ranks: int) -> None:
        self.length = _SHORTEST
        """Length in the next exchange, the same on every rank at any time."""
        self.forms: dict[tuple[torch.Size, torch.dtype], Form] = {}
        self._num_ranks = num_ranks
        self._longest = max(_SHORTEST, min(_LONGEST, _LONGEST_OF_ALL // num_ranks))
        self._before = (0, 0)
        """Digests of the previous two exchanges."""
        self._lengths: dict[tuple[int, int], int] = {}
        """The best length, by the digests of the previous two exchanges."""
        self._learnt = (0, False)
        self._fitted: dict[int, bool] = {}
        self._buffers: dict[int, Tensor] = {}

    def length_for(self, num_bytes: int) -> int:
        """Return the length of an envelope with space for the tensors, or the shortest if they cannot be sent in one."""
        needed = HEADER.size + num_bytes
        return _SHORTEST if num_bytes < 0 or needed > self._longest else max(_SHORTEST, -(-needed // 64) * 64)

    def learn(self, digest: int, num_bytes: int, fitted: bool) -> None:
        """Record an exchange in which every rank sent this digest and at most `num_bytes`, and derive the next length."""
        same = (digest, digest)
        if self._before == same and self._learnt == (num_bytes, fitted) and same in self._lengths:
            return  # unchanged repetition
        self._learnt = (num_bytes, fitted)
        if len(self._lengths) >= _KEPT:
            self._lengths.clear()
            self._fitted.clear()
        wanted, used = self.length_for(num_bytes), self._lengths.get(self._before, 0)
        self._lengths[self._before] = (
            used if wanted < used <= 2 * wanted else wanted
        )  # the number of rows may vary slightly
        self._fitted[digest] = fitted
        self._before = (self._before[1], digest)
        self.length = self._lengths.get(self._before, _SHORTEST)

    def forget(self) -> None:
        """Reset the state after an exchange in which ranks sent different digests."""
        self._before, self.length = (0, 0), _SHORTEST
        self._lengths.clear()

    def fitted(self, digest: int) -> bool:
        """Return whether the envelopes held the tensors in the last exchange with this digest."""
        return self._fitted.get(digest, False)

    def form(self, shape: torch.Size, dtype: torch.dtype, digest: int) -> Form:
        """Return buffers for a gather of this shape and dtype, stored for the next one."""
        like = torch.empty(shape, dtype=dtype, device="meta")
        head = EnvelopeHead(digest, like.nbytes, (1,))
        length = self.length_for(like.nbytes)
        kept = sum(self._buffers) * self._num_ranks + sum(form.envelope.numel() for form in self.forms.values())
        if len(self.forms) >= _KEPT or kept + length * (self._num_ranks + 1) > _KEPT_BYTES:
            self.forms.clear()
            self._buffers.clear()
        envelope = torch.zeros(length, dtype=torch.uint8)
        begin, end = HEADER.size, HEADER.size + like.nbytes
        envelope[:begin] = torch.frombuffer(bytearray(head.packed()), dtype=torch.uint8)
        if length not in self._buffers:
            self._buffers[length] = torch.zeros(self._num_ranks * length, dtype=torch.uint8)
        everyone = self._buffers[length].view(self._num_ranks, length)
        parts = [row[begin:end].view(dtype).view(shape or (1,)) for row in everyone]
        slot = envelope[begin:end].view(dtype).view(shape)
        headers = [memoryview(row[:begin]).cast("q") for row in everyone.numpy()]
        form = Form(head, envelope, slot, memoryview(head.packed()).cast("q"), everyone.view(-1), headers, parts)
        self.forms[shape, dtype] = form
        return form


def unpacked(rows: Sequence[Any], num_sizes: int) -> list[EnvelopeHead]:  # Any: buffers
    """Return the headers of the envelopes."""
    found = [HEADER.unpack_from(row) for row in rows]
    return [EnvelopeHead(values[0], values[1], values[2 : 2 + num_sizes]) for values in found]


def envelopes_of(group: ProcessGroup) -> Envelopes:
    """Return the envelopes of the group, shared by all communicators over it, so that its exchanges are counted once."""
    known = _by_group()
    if group not in known:
        known[group] = Envelopes(group.size())
    return known[group]


@cache  # torch's groups are process-wide, and so is their state
def _by_group() -> weakref.WeakKeyDictionary[ProcessGroup, Envelopes]:
    return weakref.WeakKeyDictionary()
