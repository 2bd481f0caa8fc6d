"""Fingerprints of tensors: one 64-bit number for the bits of each, computed where the tensors are, without a sync.

The bits are read as integers of at most 32 bits. Each row of 256 of them is multiplied by fixed odd 64-bit numbers and added up modulo
2**64; the sums are mixed, multiplied by an odd number for their row, and added up again. One changed element always changes the result;
several cancel each other with a chance of about 2**-32. Floating-point rules play no part: NaN has bits like any other number,
and the order of additions does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np
import torch
from torch import Tensor

CHUNK: Final = 1 << 21
"""Integers that are multiplied at once, in a few kernels however many tensors they belong to."""
_WIDTH: Final = 256
_INTEGERS: Final = {8: torch.int32, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_KEPT: Final = 64
"""Layouts that are remembered; those of a run are few, and a script that keeps changing them must not fill memory."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Up to CHUNK integers of one tensor."""

    tensor: int
    number: int
    """Of the tensor's pieces."""
    bits: Tensor


@dataclass(frozen=True, slots=True)
class _Layout:
    """How pieces of certain sizes lie behind each other, each in whole rows."""

    padding: list[Tensor | None]
    """Zeros behind each piece."""
    multipliers: Tensor
    """One for each row, by its number in the piece."""
    ends: Tensor
    """The last row of each piece."""


class Fingerprints:
    """Computes fingerprints, and keeps what depends on sizes only between calls."""

    def __init__(self) -> None:
        self._odd: dict[torch.device, Tensor] = {}
        self._layouts: dict[tuple[torch.device, torch.dtype, tuple[int, ...]], _Layout] = {}
        self._places: dict[tuple[torch.device, tuple[tuple[int, int], ...]], tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def of(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """The fingerprint of each tensor, as int64 on `device`. Tensors may lie on different devices."""
        result = torch.zeros(len(tensors), dtype=torch.int64, device=device)
        kinds: dict[tuple[torch.device, torch.dtype], list[_Piece]] = {}
        for index, tensor in enumerate(tensors):
            bits = _bits(tensor)
            if size := bits.numel():
                parts = torch.split(bits, CHUNK) if size > CHUNK else (bits,)
                known = kinds.setdefault((bits.device, bits.dtype), [])
                known += [_Piece(index, number, part) for number, part in enumerate(parts)]
        found: list[Tensor] = []
        places: list[tuple[int, int]] = []
        for pieces in kinds.values():
            for batch in _packed(pieces):
                found.append(self._batch([piece.bits for piece in batch]).to(device, non_blocking=True))
                places += [(piece.tensor, piece.number) for piece in batch]
        if found:
            where, multipliers = self._place(tuple(places), device)
            result.index_add_(0, where, torch.cat(found) * multipliers)
        return result

    def _batch(self, pieces: list[Tensor]) -> Tensor:
        """The fingerprint of each piece."""
        device = pieces[0].device
        layout = self._layout(device, pieces[0].dtype, tuple(piece.numel() for piece in pieces))
        padded = [part for both in zip(pieces, layout.padding, strict=True) for part in both if part is not None]
        flat = torch.cat(padded) if len(padded) > 1 else padded[0]
        rows = (flat.view(-1, _WIDTH) * self._multipliers(device)[:_WIDTH]).sum(1)
        sums = ((rows ^ (rows >> 32)) * layout.multipliers).cumsum(0)[layout.ends]
        return torch.diff(sums, prepend=sums.new_zeros(1)) if len(pieces) > 1 else sums

    def _layout(self, device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> _Layout:
        key = device, dtype, sizes
        if key not in self._layouts:
            if len(self._layouts) >= _KEPT:
                self._layouts.clear()
            heights = [-(-size // _WIDTH) for size in sizes]
            numbers = torch.cat([torch.arange(height) for height in heights]).to(device)
            self._layouts[key] = _Layout(
                [torch.zeros(rest, dtype=dtype, device=device) if (rest := -size % _WIDTH) else None for size in sizes],
                self._multipliers(device)[_WIDTH + numbers],
                torch.tensor([end - 1 for end in accumulate(heights)], device=device),
            )
        return self._layouts[key]

    def _place(self, places: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
        """The tensor that each piece belongs to, and an odd number for the piece's number."""
        key = device, places
        if key not in self._places:
            if len(self._places) >= _KEPT:
                self._places.clear()
            tensors, numbers = torch.tensor(places, device=device).unbind(1)
            self._places[key] = tensors, self._multipliers(device, int(numbers.max()) + 1)[numbers]
        return self._places[key]

    def _multipliers(self, device: torch.device, least: int = 0) -> Tensor:
        known = self._odd.get(device)
        if known is None or known.numel() < least:
            count = max(least, _WIDTH + CHUNK // _WIDTH)
            known = self._odd[device] = torch.from_numpy(_odd_numbers(count)).to(device)
        return known


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's memory as a flat tensor of integers."""
    flat = tensor.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    if flat.is_neg():
        flat = flat.resolve_neg()
    return flat.view(_INTEGERS[flat.element_size()])


def _packed(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    """Runs of pieces that have room in one batch."""
    batch: list[_Piece] = []
    used = 0
    for piece in pieces:
        taken = -(-piece.bits.numel() // _WIDTH) * _WIDTH
        if batch and used + taken > CHUNK:
            yield batch
            batch, used = [], 0
        batch.append(piece)
        used += taken
    yield batch


def _odd_numbers(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Odd numbers without a pattern (a counter through splitmix64's finaliser), the same on every rank."""
    with np.errstate(over="ignore"):
        mixed = (np.arange(1, count + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    odd: np.ndarray[tuple[int], np.dtype[np.int64]] = (mixed | np.uint64(1)).view(np.int64)
    return odd
