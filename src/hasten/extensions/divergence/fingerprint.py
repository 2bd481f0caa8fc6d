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
_INTEGERS: Final = MappingProxyType(
    {8: torch.int32, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
)
_MOST_LAYOUTS: Final = 64
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
        self._layouts: dict[
            tuple[torch.device, torch.dtype, tuple[int, ...]], _Layout
        ] = {}
        self._places: dict[
            tuple[torch.device, tuple[tuple[int, int], ...]], tuple[Tensor, Tensor]
        ] = {}

    @torch.no_grad()
    def of(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the fingerprint of each tensor, as int64 on `device`. Tensors may be on different devices."""
        result = torch.zeros(len(tensors), dtype=torch.int64, device=device)
        pieces_by_kind: dict[tuple[torch.device, torch.dtype], list[Piece]] = {}
        for index, tensor in enumerate(tensors):
            flat_tensor = _flatten(tensor)
            if size := flat_tensor.numel():
                pieces_of_kind = pieces_by_kind.setdefault(
                    (flat_tensor.device, flat_tensor.dtype), []
                )
                if size <= CHUNK:
                    pieces_of_kind.append((index, 0, flat_tensor))
                else:
                    pieces_of_kind += [
                        (index, piece_number, piece)
                        for piece_number, piece in enumerate(
                            torch.split(flat_tensor, CHUNK)
                        )
                    ]
        fingerprints: list[Tensor] = []
        places: list[tuple[int, int]] = []
        for pieces in pieces_by_kind.values():
            for batch in _pack_pieces(pieces):
                fingerprints.append(
                    self._batch([elements for _, _, elements in batch]).to(
                        device, non_blocking=True
                    )
                )
                places += [(index, piece_number) for index, piece_number, _ in batch]
        if fingerprints:
            tensor_indices, multipliers = self._place(tuple(places), device)
            result.index_add_(0, tensor_indices, torch.cat(fingerprints) * multipliers)
        return result

    def _batch(self, pieces: list[Tensor]) -> Tensor:
        """Return the fingerprint of each piece."""
        device = pieces[0].device
        layout = self._layout(
            device, pieces[0].dtype, tuple(piece.numel() for piece in pieces)
        )
        padded_pieces = [
            tensor
            for piece_and_padding in zip(pieces, layout.padding, strict=True)
            for tensor in piece_and_padding
            if tensor is not None
        ]
        flat = torch.cat(padded_pieces) if len(padded_pieces) > 1 else padded_pieces[0]
        integers = flat.view(_INTEGERS[flat.element_size()])
        rows = (integers.view(-1, _WIDTH) * self._multipliers(device)[:_WIDTH]).sum(1)
        sums = ((rows ^ (rows >> 32)) * layout.multipliers).cumsum(0)[layout.ends]
        return torch.diff(sums, prepend=sums.new_zeros(1)) if len(pieces) > 1 else sums

    def _layout(
        self, device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]
    ) -> _Layout:
        key = device, dtype, sizes
        if key not in self._layouts:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            width = _row_elements(dtype)
            heights = [-(-size // width) for size in sizes]
            row_numbers = torch.cat([torch.arange(height) for height in heights]).to(
                device
            )
            self._layouts[key] = _Layout(
                [
                    torch.zeros(num_padding, dtype=dtype, device=device)
                    if (num_padding := -size % width)
                    else None
                    for size in sizes
                ],
                self._multipliers(device)[_WIDTH + row_numbers],
                torch.tensor(
                    [last_row_end - 1 for last_row_end in accumulate(heights)],
                    device=device,
                ),
            )
        return self._layouts[key]

    def _place(
        self, places: tuple[tuple[int, int], ...], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return the index of each piece's tensor, and an odd multiplier for each piece's index."""
        key = device, places
        if key not in self._places:
            if len(self._places) >= _MOST_LAYOUTS:
                self._places.clear()
            tensor_indices, piece_numbers = torch.tensor(places, device=device).unbind(
                1
            )
            self._places[key] = (
                tensor_indices,
                self._multipliers(device, int(piece_numbers.max()) + 1)[piece_numbers],
            )
        return self._places[key]

    def _multipliers(self, device: torch.device, least_count: int = 0) -> Tensor:
        known_multipliers = self._odd.get(device)
        if known_multipliers is None or known_multipliers.numel() < least_count:
            count = max(least_count, _WIDTH + _DEVICE_ROWS)
            known_multipliers = self._odd[device] = torch.from_numpy(
                _make_odd_numbers(count)
            ).to(device)
        return known_multipliers


def _flatten(tensor: Tensor) -> Tensor:
    """Return the tensor's memory as a flat tensor of a dtype that torch.cat supports."""
    dtype = tensor.dtype
    if dtype.is_complex:
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    flat = tensor.reshape(-1)
    # torch.cat does not support 8-bit floats
    return flat if dtype.itemsize > 1 else flat.view(torch.uint8)


def _row_elements(dtype: torch.dtype) -> int:
    """Return the number of elements in one row of integers."""
    return _WIDTH // 2 if dtype.itemsize == 8 else _WIDTH


def _pack_pieces(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Yield lists of consecutive pieces that fit into one batch."""
    width, most_rows = (
        _row_elements(pieces[0][2].dtype),
        _CPU_ROWS if pieces[0][2].is_cpu else _DEVICE_ROWS,
    )
    batch: list[Piece] = []
    num_used_rows = 0
    for piece in pieces:
        num_rows = -(-piece[2].numel() // width)
        if batch and num_used_rows + num_rows > most_rows:
            yield batch
            batch, num_used_rows = [], 0
        batch.append(piece)
        num_used_rows += num_rows
    yield batch


def _make_odd_numbers(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return pseudo-random odd numbers (a counter through splitmix64's finaliser), identical on every rank."""
    with np.errstate(over="ignore"):
        mixed_counters = (np.arange(1, count + 1, dtype=np.uint64)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        mixed_counters = (
            mixed_counters ^ (mixed_counters >> np.uint64(30))
        ) * np.uint64(0xBF58476D1CE4E5B9)
        mixed_counters = (
            mixed_counters ^ (mixed_counters >> np.uint64(27))
        ) * np.uint64(0x94D049BB133111EB)
        mixed_counters ^= mixed_counters >> np.uint64(31)
    odd_numbers: np.ndarray[tuple[int], np.dtype[np.int64]] = (
        mixed_counters | np.uint64(1)
    ).view(np.int64)
    return odd_numbers


_AXES: Final = (Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.CP, Axis.TP)
"""Axes along which values can be equal; pipeline stages hold different layers."""
_NUM_AXES_CLASSES: Final = 1 << len(_AXES)
_MASK: Final = (1 << 64) - 1
_KEPT_CHECKS: Final = 16
"""Number of recent checks whose messages stay in the store; each overwrites the one that is this many checks older."""
_AGREED: Final = "agreed"


class FingerprintStore:
    """Exchange of fingerprints through the job's store. Checks are numbered identically on every rank."""

    def __init__(self, store: Store, rank: int, mesh: MeshSpec) -> None:
        store_number = store.add(
            f"hasten/sentinel/made/{rank}", 1
        )  # every rank creates its Accelerators in the same order
        self._prefix = f"hasten/sentinel/{store_number}"
        self._store = store
        self._rank = rank
        self._size = mesh.world_size
        self._first_peer = _find_first_peers(mesh) if rank == 0 else None
        self._decided: dict[int, bool] = {}

    def post(self, number: int, records: Sequence[Record]) -> None:
        """Post this rank's values as one sum per set of axes. The order of the records does not matter."""
        sums = [0] * _NUM_AXES_CLASSES
        for record in records:
            axes_class = _axes_class_of(record.axes)
            sums[axes_class] = (sums[axes_class] + record.value) & _MASK
        self._note(number, self._rank, np.array(sums, dtype=np.uint64).tobytes().hex())

    def verdict(self, number: int) -> bool | None:
        """Return whether all ranks that must agree have posted the same; None until rank 0 has all posts."""
        if self._first_peer is None:
            messages = self._peek(number, ["verdict"])
            return None if messages is None else messages[0] == _AGREED
        if number not in self._decided:
            posts = self._peek(number, range(self._size))
            if posts is None:
                return None
            posted_sums = np.stack(
                [np.frombuffer(bytes.fromhex(post), dtype=np.uint64) for post in posts]
            )
            is_equal = bool(
                (
                    posted_sums
                    == np.take_along_axis(posted_sums, self._first_peer, axis=0)
                ).all()
            )
            if self._size > 1:
                self._note(number, "verdict", _AGREED if is_equal else "differ")
            self._decided[number] = is_equal
            self._decided.pop(number - _KEPT_CHECKS, None)
        return self._decided[number]

    def show(self, number: int, records: Sequence[Record]) -> None:
        """Post the full records of this rank."""
        self._note(number, f"held/{self._rank}", msgspec.json.encode(records).decode())

    def shown(self, number: int) -> dict[int, list[Record]] | None:
        """Return the full records of every rank; None until all have posted."""
        posts = self._peek(number, [f"held/{rank}" for rank in range(self._size)])
        if posts is None:
            return None
        return {
            rank: msgspec.json.decode(post, type=list[Record])
            for rank, post in enumerate(posts)
        }

    def set_answer(self, number: int, answer: str) -> None:
        """Post rank 0's diagnosis for every rank."""
        self._note(number, "answer", answer)

    def answer(self, number: int) -> str | None:
        """Return rank 0's diagnosis; None until it is posted."""
        messages = self._peek(number, ["answer"])
        return None if messages is None else messages[0]

    def _key(self, number: int, message_name: int | str) -> str:
        return f"{self._prefix}/{number % _KEPT_CHECKS}/{message_name}"

    def _note(self, number: int, message_name: int | str, text: str) -> None:
        self._store.set(self._key(number, message_name), f"{number}:{text}")

    def _peek(
        self, number: int, message_names: Iterable[int | str]
    ) -> list[str] | None:
        """Return the given messages of a check, or None while one is missing; never waits."""
        keys = [self._key(number, message_name) for message_name in message_names]
        if not self._store.check(keys):
            return None
        notes = [value.decode().partition(":") for value in self._store.multi_get(keys)]
        return (
            [text for _, _, text in notes]
            if all(check_number == str(number) for check_number, _, _ in notes)
            else None
        )


# called for every tensor in every check, with few different sets of axes
@lru_cache(maxsize=64)
def _axes_class_of(axes: tuple[str, ...]) -> int:
    return sum(1 << position for position, axis in enumerate(_AXES) if axis in axes)


def _find_first_peers(
    mesh: MeshSpec,
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return, for each rank and set of axes, the first of the ranks that must hold the same values."""
    first_peers = np.zeros((mesh.world_size, _NUM_AXES_CLASSES), dtype=np.int64)
    for axes_class in range(_NUM_AXES_CLASSES):
        axes = [
            axis for position, axis in enumerate(_AXES) if axes_class >> position & 1
        ]
        for group in mesh.groups(*axes):
            first_peers[list(group), axes_class] = group[0]
    return first_peers
