"""Envelopes: the exchange that begins every collective on trees, and carries the tensors of a gather if they are not large.

An envelope is a header and room for tensors. The header holds a digest of the operation, the structure, the shapes and the dtypes,
the number of bytes the tensors take, and the sizes of a dimension that may differ between ranks. In one exchange all envelopes have the
same length, whatever each rank is about to do, so that ranks which call different operations still meet and can say so. The length
follows from the exchanges before, which every rank has seen alike: a gather that comes where one of the same size came before finds room.
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
"""Sizes of the free dimension that a header holds."""
_SHORTEST: Final = 1024
_LONGEST: Final = 2 << 20
_LONGEST_OF_ALL: Final = 8 << 20
"""Bytes of all envelopes of an exchange together; larger tensors have an exchange of their own, which needs no copies."""
_KEPT: Final = 256
"""Situations, and shapes, of which something is remembered."""
_KEPT_BYTES: Final = 16 << 20


class Head(NamedTuple):
    """The header of an envelope."""

    digest: int
    num_bytes: int
    """Bytes of the tensors; -1 where they cannot travel in an envelope, such as tensors on an accelerator."""
    sizes: tuple[int, ...] = ()
    """The size along the free dimension of each tensor."""

    def packed(self) -> bytes:
        return HEADER.pack(self.digest, self.num_bytes, *self.sizes, *[0] * (NUM_SIZES - len(self.sizes)))


class Form(NamedTuple):
    """Buffers for gathering tensors of one shape and dtype again and again."""

    head: Head
    envelope: Tensor
    slot: Tensor
    """The part of the envelope that holds the tensor."""
    header: bytes
    """What every envelope must begin with."""
    everyone: Tensor
    """The envelopes of all ranks: one buffer for all forms of this length."""
    headers: list[memoryview]
    """What they begin with."""
    parts: list[Tensor]
    """The tensors of all ranks in `everyone`."""


class Envelopes:
    """The envelopes of one process group: how long the next one is, and buffers for shapes that come again."""

    def __init__(self, num_ranks: int) -> None:
        self.length = _SHORTEST
        """Of the next exchange: the same on every rank at any time."""
        self.forms: dict[tuple[torch.Size, torch.dtype], Form] = {}
        self._num_ranks = num_ranks
        self._longest = max(_SHORTEST, min(_LONGEST, _LONGEST_OF_ALL // num_ranks))
        self._before = (0, 0)
        """The digests of the two exchanges before."""
        self._lengths: dict[tuple[int, int], int] = {}
        """The length that would have been right, by the digests of the two exchanges before."""
        self._learnt = (0, False)
        self._fitted: dict[int, bool] = {}
        self._buffers: dict[int, Tensor] = {}

    def length_for(self, num_bytes: int) -> int:
        """The length of an envelope that has room for the tensors, or the shortest if they cannot travel in one."""
        needed = HEADER.size + num_bytes
        return _SHORTEST if num_bytes < 0 or needed > self._longest else max(_SHORTEST, -(-needed // 64) * 64)

    def learn(self, digest: int, num_bytes: int, fitted: bool) -> None:
        """Note an exchange in which every rank sent this digest, and `num_bytes` at most; the next length follows from it."""
        same = (digest, digest)
        if self._before == same and self._learnt == (num_bytes, fitted) and same in self._lengths:
            return  # the same again and again: nothing changes
        self._learnt = (num_bytes, fitted)
        if len(self._lengths) >= _KEPT:
            self._lengths.clear()
            self._fitted.clear()
        wanted, used = self.length_for(num_bytes), self._lengths.get(self._before, 0)
        self._lengths[self._before] = (
            used if wanted < used <= 2 * wanted else wanted
        )  # rows may differ a little each time
        self._fitted[digest] = fitted
        self._before = (self._before[1], digest)
        self.length = self._lengths.get(self._before, _SHORTEST)

    def forget(self) -> None:
        """Begin anew, after an exchange in which ranks sent different digests."""
        self._before, self.length = (0, 0), _SHORTEST
        self._lengths.clear()

    def fitted(self, digest: int) -> bool:
        """Return whether the tensors travelled along in the last exchange with this digest."""
        return self._fitted.get(digest, False)

    def form(self, shape: torch.Size, dtype: torch.dtype, digest: int) -> Form:
        """Return the buffers for a gather of this shape and dtype, kept for the next one."""
        like = torch.empty(shape, dtype=dtype, device="meta")
        head = Head(digest, like.nbytes, (1,))
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
        headers = [memoryview(row[:begin]) for row in everyone.numpy()]
        form = Form(head, envelope, slot, head.packed(), everyone.view(-1), headers, parts)
        self.forms[shape, dtype] = form
        return form


def unpacked(rows: Sequence[Any], num_sizes: int) -> list[Head]:  # Any: buffers
    """Return the headers of the envelopes."""
    found = [HEADER.unpack_from(row) for row in rows]
    return [Head(values[0], values[1], values[2 : 2 + num_sizes]) for values in found]


def envelopes_of(group: ProcessGroup) -> Envelopes:
    """The envelopes of the group, shared by every communicator over it: its exchanges are counted once, whoever begins them."""
    known = _by_group()
    if group not in known:
        known[group] = Envelopes(group.size())
    return known[group]


@cache  # torch's groups belong to the whole process, and so does what is known of them
def _by_group() -> weakref.WeakKeyDictionary[ProcessGroup, Envelopes]:
    return weakref.WeakKeyDictionary()
