"""Fingerprints of tensors: a 64-bit hash of each tensor's bits, computed on its device without a sync.

The bits are read as integers of at most 32 bits. Each row of 256 of them is multiplied by fixed odd 64-bit numbers and summed modulo
2**64; the sums are mixed, multiplied by an odd number for their row, and summed again. One changed element always changes the result;
several changes cancel with a probability of about 2**-32. Floating-point rules do not apply: NaN has bits like any other number,
and the order of additions does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from types import MappingProxyType
from typing import Final

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.distributed import Store

from hasten.extensions.divergence.divergence import Record
from hasten.runtime.mesh_plan import Axis, MeshSpec

CHUNK: Final = 1 << 18
"""Elements per piece of a tensor."""
_CPU_ROWS, _DEVICE_ROWS = 1 << 10, 1 << 13
"""Rows multiplied at once, in a few kernels for any number of tensors; a smaller number fits a CPU's cache."""
_WIDTH: Final = 256
_INTEGERS: Final = MappingProxyType({8: torch.int32, 4: torch.int32, 2: torch.int16, 1: torch.uint8})
_KEPT: Final = 64
"""Size of the layout cache; a run has few layouts, and a script that keeps changing them must not fill memory."""


Piece = tuple[int, int, Tensor]
"""Up to CHUNK elements: the index of their tensor, the index of the piece in the tensor, and the elements."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Memory layout of consecutive pieces of given sizes, each padded to whole rows."""

    padding: list[Tensor | None]
    """Zeros to append to each piece."""
    multipliers: Tensor
    """One multiplier per row, by its index in the piece."""
    ends: Tensor
    """The last row of each piece."""


class Fingerprints:
    """Computes fingerprints, with a cache of data that depends on sizes only."""

    def __init__(self) -> None:
        self._odd: dict[torch.device, Tensor] = {}
        self._layouts: dict[tuple[torch.device, torch.dtype, tuple[int, ...]], _Layout] = {}
        self._places: dict[tuple[torch.device, tuple[tuple[int, int], ...]], tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def of(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the fingerprint of each tensor, as int64 on `device`. Tensors may be on different devices."""
        result = torch.zeros(len(tensors), dtype=torch.int64, device=device)
        kinds: dict[tuple[torch.device, torch.dtype], list[Piece]] = {}
        for index, tensor in enumerate(tensors):
            flat = _flat(tensor)
            if size := flat.numel():
                known = kinds.setdefault((flat.device, flat.dtype), [])
                if size <= CHUNK:
                    known.append((index, 0, flat))
                else:
                    known += [(index, number, part) for number, part in enumerate(torch.split(flat, CHUNK))]
        found: list[Tensor] = []
        places: list[tuple[int, int]] = []
        for pieces in kinds.values():
            for batch in _packed(pieces):
                found.append(self._batch([elements for _, _, elements in batch]).to(device, non_blocking=True))
                places += [(index, number) for index, number, _ in batch]
        if found:
            where, multipliers = self._place(tuple(places), device)
            result.index_add_(0, where, torch.cat(found) * multipliers)
        return result

    def _batch(self, pieces: list[Tensor]) -> Tensor:
        """Return the fingerprint of each piece."""
        device = pieces[0].device
        layout = self._layout(device, pieces[0].dtype, tuple(piece.numel() for piece in pieces))
        padded = [part for both in zip(pieces, layout.padding, strict=True) for part in both if part is not None]
        flat = torch.cat(padded) if len(padded) > 1 else padded[0]
        integers = flat.view(_INTEGERS[flat.element_size()])
        rows = (integers.view(-1, _WIDTH) * self._multipliers(device)[:_WIDTH]).sum(1)
        sums = ((rows ^ (rows >> 32)) * layout.multipliers).cumsum(0)[layout.ends]
        return torch.diff(sums, prepend=sums.new_zeros(1)) if len(pieces) > 1 else sums

    def _layout(self, device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> _Layout:
        key = device, dtype, sizes
        if key not in self._layouts:
            if len(self._layouts) >= _KEPT:
                self._layouts.clear()
            width = _width(dtype)
            heights = [-(-size // width) for size in sizes]
            numbers = torch.cat([torch.arange(height) for height in heights]).to(device)
            self._layouts[key] = _Layout(
                [torch.zeros(rest, dtype=dtype, device=device) if (rest := -size % width) else None for size in sizes],
                self._multipliers(device)[_WIDTH + numbers],
                torch.tensor([end - 1 for end in accumulate(heights)], device=device),
            )
        return self._layouts[key]

    def _place(self, places: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the index of each piece's tensor, and an odd multiplier for each piece's index."""
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
            count = max(least, _WIDTH + _DEVICE_ROWS)
            known = self._odd[device] = torch.from_numpy(_odd_numbers(count)).to(device)
        return known


def _flat(tensor: Tensor) -> Tensor:
    """Return the tensor's memory as a flat tensor of a dtype that torch.cat supports."""
    dtype = tensor.dtype
    if dtype.is_complex:
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    flat = tensor.reshape(-1)
    return flat if dtype.itemsize > 1 else flat.view(torch.uint8)  # torch.cat does not support 8-bit floats


def _width(dtype: torch.dtype) -> int:
    """Return the number of elements in one row of integers."""
    return _WIDTH // 2 if dtype.itemsize == 8 else _WIDTH


def _packed(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Yield lists of consecutive pieces that fit into one batch."""
    width, room = _width(pieces[0][2].dtype), _CPU_ROWS if pieces[0][2].is_cpu else _DEVICE_ROWS
    batch: list[Piece] = []
    used = 0
    for piece in pieces:
        rows = -(-piece[2].numel() // width)
        if batch and used + rows > room:
            yield batch
            batch, used = [], 0
        batch.append(piece)
        used += rows
    yield batch


def _odd_numbers(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return pseudo-random odd numbers (a counter through splitmix64's finaliser), identical on every rank."""
    with np.errstate(over="ignore"):
        mixed = (np.arange(1, count + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    odd: np.ndarray[tuple[int], np.dtype[np.int64]] = (mixed | np.uint64(1)).view(np.int64)
    return odd


_AXES: Final = (Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.CP, Axis.TP)
"""Axes along which values can be equal; pipeline stages hold different layers."""
_CLASSES: Final = 1 << len(_AXES)
_MASK: Final = (1 << 64) - 1
_KEPT_VOTES: Final = 16
"""Number of recent checks whose messages stay in the store; each overwrites the one that is this many checks older."""
_AGREED: Final = "agreed"


class FingerprintStore:
    """Exchange of fingerprints through the job's store. Checks are numbered identically on every rank."""

    def __init__(self, store: Store, rank: int, mesh: MeshSpec) -> None:
        made = store.add(f"hasten/sentinel/made/{rank}", 1)  # every rank creates its Accelerators in the same order
        self._prefix = f"hasten/sentinel/{made}"
        self._store = store
        self._rank = rank
        self._size = mesh.world_size
        self._first_peer = _first_peers(mesh) if rank == 0 else None
        self._decided: dict[int, bool] = {}

    def post(self, number: int, records: Sequence[Record]) -> None:
        """Post this rank's values as one sum per set of axes. The order of the records does not matter."""
        sums = [0] * _CLASSES
        for record in records:
            which = _class_of(record.axes)
            sums[which] = (sums[which] + record.value) & _MASK
        self._note(number, self._rank, np.array(sums, dtype=np.uint64).tobytes().hex())

    def verdict(self, number: int) -> bool | None:
        """Return whether all ranks that must agree have posted the same; None until rank 0 has all posts."""
        if self._first_peer is None:
            found = self._peek(number, ["verdict"])
            return None if found is None else found[0] == _AGREED
        if number not in self._decided:
            posts = self._peek(number, range(self._size))
            if posts is None:
                return None
            held = np.stack([np.frombuffer(bytes.fromhex(post), dtype=np.uint64) for post in posts])
            same = bool((held == np.take_along_axis(held, self._first_peer, axis=0)).all())
            if self._size > 1:
                self._note(number, "verdict", _AGREED if same else "differ")
            self._decided[number] = same
            self._decided.pop(number - _KEPT_VOTES, None)
        return self._decided[number]

    def show(self, number: int, records: Sequence[Record]) -> None:
        """Post the full records of this rank."""
        self._note(number, f"held/{self._rank}", msgspec.json.encode(records).decode())

    def shown(self, number: int) -> dict[int, list[Record]] | None:
        """Return the full records of every rank; None until all have posted."""
        posts = self._peek(number, [f"held/{rank}" for rank in range(self._size)])
        if posts is None:
            return None
        return {rank: msgspec.json.decode(post, type=list[Record]) for rank, post in enumerate(posts)}

    def set_answer(self, number: int, answer: str) -> None:
        """Post rank 0's diagnosis for every rank."""
        self._note(number, "answer", answer)

    def answer(self, number: int) -> str | None:
        """Return rank 0's diagnosis; None until it is posted."""
        found = self._peek(number, ["answer"])
        return None if found is None else found[0]

    def _key(self, number: int, what: int | str) -> str:
        return f"{self._prefix}/{number % _KEPT_VOTES}/{what}"

    def _note(self, number: int, what: int | str, text: str) -> None:
        self._store.set(self._key(number, what), f"{number}:{text}")

    def _peek(self, number: int, what: Iterable[int | str]) -> list[str] | None:
        """Return the given messages of a check, or None while one is missing; never waits."""
        keys = [self._key(number, one) for one in what]
        if not self._store.check(keys):
            return None
        notes = [value.decode().partition(":") for value in self._store.multi_get(keys)]
        return [text for _, _, text in notes] if all(found == str(number) for found, _, _ in notes) else None


@lru_cache(maxsize=64)  # called for every tensor in every check, with few different sets of axes
def _class_of(axes: tuple[str, ...]) -> int:
    return sum(1 << position for position, axis in enumerate(_AXES) if axis in axes)


def _first_peers(mesh: MeshSpec) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return, for each rank and set of axes, the first of the ranks that must hold the same values."""
    first = np.zeros((mesh.world_size, _CLASSES), dtype=np.int64)
    for which in range(_CLASSES):
        axes = [axis for position, axis in enumerate(_AXES) if which >> position & 1]
        for group in mesh.groups(*axes):
            first[list(group), which] = group[0]
    return first
