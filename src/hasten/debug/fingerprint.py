"""Fingerprints of tensors: one 64-bit number for the bits of each, computed where the tensors are, without a sync.

The bits are read as integers of at most 32 bits, multiplied by a fixed odd 64-bit number for each position and added up modulo
2**64. One changed element always changes the sum; several cancel each other with a chance of at most about 2**-32. Floating-point
rules play no part: NaN has bits like any other number, and the order of additions does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

CHUNK: Final = 1 << 18
"""Elements that are multiplied at once in one row; as many odd numbers are kept for each device."""
_ROWS: Final = 8
_WIDTHS: Final = ((8, torch.int32), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


class Fingerprints:
    """Computes fingerprints, and keeps the multipliers of each device between calls."""

    def __init__(self) -> None:
        self._odd: dict[torch.device, Tensor] = {}
        self._ends: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}

    @torch.no_grad()
    def of(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """The fingerprint of each tensor, as int64 on `device`. Tensors may lie on different devices."""
        result = torch.zeros(len(tensors), dtype=torch.int64, device=device)
        batches: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
        for index, tensor in enumerate(tensors):
            bits = _bits(tensor)
            if bits.numel() > CHUNK:
                result[index] = self._long(bits).to(device, non_blocking=True)
            elif bits.numel():
                batches.setdefault((bits.device, bits.dtype), []).append((index, bits))
        for (place, _), small in batches.items():
            for batch in _packed(small):
                found = self._short([bits for _, bits in batch], place).to(device, non_blocking=True)
                where = self._index(tuple(index for index, _ in batch), device)
                result.index_copy_(0, where, found)
        return result

    def _short(self, parts: list[Tensor], device: torch.device) -> Tensor:
        """The fingerprints of tensors that fit into one row together, in a few kernels whatever their number."""
        flat = torch.cat(parts) if len(parts) > 1 else parts[0]
        sums = (flat * self._multipliers(device)[: flat.numel()]).cumsum(0)
        sizes = np.cumsum([part.numel() for part in parts])
        ends = sums[self._index(tuple(int(size) - 1 for size in sizes), device)]
        return torch.diff(ends, prepend=ends.new_zeros(1))

    def _long(self, bits: Tensor) -> Tensor:
        """The fingerprint of one long tensor: of the fingerprints of its rows."""
        odd = self._multipliers(bits.device)
        whole = bits.numel() // CHUNK
        rows = bits[: whole * CHUNK].view(whole, CHUNK)
        sums = [(rows[first : first + _ROWS] * odd).sum(1) for first in range(0, whole, _ROWS)]
        rest = bits[whole * CHUNK :]
        sums.append((rest * odd[: rest.numel()]).sum(0, keepdim=True))
        every = torch.cat(sums)
        return (every * self._multipliers(bits.device, every.numel())[: every.numel()]).sum()

    def _multipliers(self, device: torch.device, least: int = CHUNK) -> Tensor:
        known = self._odd.get(device)
        if known is None or known.numel() < least:
            known = self._odd[device] = torch.from_numpy(_odd_numbers(max(least, CHUNK))).to(device)
        return known

    def _index(self, positions: tuple[int, ...], device: torch.device) -> Tensor:
        key = device, positions
        if key not in self._ends:
            if len(self._ends) > 64:  # layouts of a run are few; a script that keeps changing them must not fill memory
                self._ends.clear()
            self._ends[key] = torch.tensor(positions, device=device)
        return self._ends[key]


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's memory as a flat tensor of integers."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    return flat.resolve_neg().view(dict(_WIDTHS)[flat.element_size()])


def _packed(parts: list[tuple[int, Tensor]]) -> Iterator[list[tuple[int, Tensor]]]:
    """Runs of tensors that have room in one row."""
    batch: list[tuple[int, Tensor]] = []
    used = 0
    for part in parts:
        if used + part[1].numel() > CHUNK:
            yield batch
            batch, used = [], 0
        batch.append(part)
        used += part[1].numel()
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
