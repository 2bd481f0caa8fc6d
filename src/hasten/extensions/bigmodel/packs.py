"""Packs: the offloaded tensors of one block in contiguous memory, with the source of their bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hasten.checkpoint.format.formats import Piece
from hasten.checkpoint.reshard import Copy, run_copies
from hasten.checkpoint.store.disk import as_bytes, copy_bytes
from hasten.runtime.host_pool import HostPool, aligned_bytes

Table = dict[str, Tensor | None]  # a module's parameters or buffers by name
_VIEWS_KEPT = 4


@dataclass(slots=True, eq=False)
class PackedTensor:
    """One offloaded tensor: the object in the model while it is unused, and all module tables that refer to it."""

    rest: Tensor
    places: list[tuple[Table, str]]
    piece: Piece | None = None
    """Piece of a file, for weights that stay on the disk."""
    offset: int = 0
    home: tuple[Tensor, int] | None = None
    """The slab of host memory and the offset of the bytes in it."""
    to_host: bool = False
    """True if the tensor is in a file and is read to host memory when the pack is settled."""
    written: int = 0
    """Version of the resting tensor that equals the file."""

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.rest.numel() * self.rest.element_size()

    def put(self, tensor: Tensor) -> None:
        """Make the model use `tensor`."""
        for table, name in self.places:
            table[name] = tensor


@dataclass(slots=True, eq=False)
class Pack:
    """Tensors that are fetched together, as one range of bytes."""

    name: str
    entries: list[PackedTensor] = field(default_factory=list)
    loose: list[PackedTensor] = field(default_factory=list)
    """Tensors of other kinds (quantized ones, subclasses), which are moved one by one with `Tensor.to`."""
    num_bytes: int = 0
    segments: list[tuple[int, Tensor]] = field(default_factory=list)
    """Ranges of page-locked memory with all bytes, and their offsets in the pack; empty if bytes must be read first."""
    views: dict[int, list[Tensor]] = field(default_factory=dict)

    def add(self, entry: PackedTensor) -> None:
        """Append a tensor."""
        if not plain(entry.rest):
            self.loose.append(entry)
            return
        entry.offset = self.num_bytes
        self.entries.append(entry)
        self.num_bytes += aligned_bytes(entry.num_bytes)

    def settle(self, pool: HostPool) -> None:
        """Move tensors that rest in host memory into the pool; the model's tensor objects stay the same where possible."""
        copies = [_load(entry, pool) for entry in self.entries if entry.to_host]
        if copies:
            run_copies(copies)
        for entry in self.entries:
            if entry.piece is None and entry.home is None:
                _move(entry, pool)
        self.segments = _segments(self.entries)

    def stamp(self) -> tuple[int, ...]:
        """Return the tensors' versions, which change when a resting tensor is written to."""
        return tuple(entry.rest._version for entry in self.entries)

    def read_into(self, target: Tensor, threads: int | None = None) -> None:
        """Fill flat host memory with the pack's bytes, read from files in parallel."""
        copies = []
        for entry in self.entries:
            place = target[entry.offset : entry.offset + entry.num_bytes]
            if entry.piece is None or entry.rest._version != entry.written:
                copy_bytes(place, _storage_bytes(entry.rest))
            else:
                copies.append(Copy(place, as_bytes(entry.piece.data), entry.piece.file))
        if copies:
            run_copies(copies, threads)

    def views_at(self, buffer: Tensor, start: int) -> list[Tensor]:
        """Return the tensors as views of `buffer` from byte `start` on, as parameters where the originals are."""
        wanted = [entry.rest.requires_grad for entry in self.entries]
        found = self.views.get(start)
        if found is None or [view.requires_grad for view in found] != wanted:
            with torch.inference_mode(False), torch.no_grad():
                found = [_view(entry, buffer, start) for entry in self.entries]
            if len(self.views) >= _VIEWS_KEPT:
                self.views.pop(next(iter(self.views)))
            self.views[start] = found
        return found


def plain(tensor: Tensor) -> bool:
    """Return whether a tensor is plain, dense memory that its bytes fully describe."""
    if (
        type(tensor) not in (Tensor, nn.Parameter, nn.Buffer)
        or tensor.layout is not torch.strided
    ):
        return False
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return False
    span = 1 + sum(
        (size - 1) * stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.numel() == 0 or span == tensor.numel()


def _view(entry: PackedTensor, buffer: Tensor, start: int) -> Tensor:
    rest = entry.rest
    flat = buffer[start + entry.offset : start + entry.offset + entry.num_bytes].view(
        rest.dtype
    )
    # .data: separate version counters, since copies of other packs count as writes to the whole buffer
    shaped = torch.as_strided(
        flat, rest.shape, rest.stride(), flat.storage_offset()
    ).data
    if not isinstance(rest, nn.Parameter):
        return shaped
    parameter = _parameter(shaped, rest)
    if parameter.requires_grad:
        # torch leaves it untyped
        register: Callable[..., object] = parameter.register_post_accumulate_grad_hook
        register(_forget_gradient)
    return parameter


def _parameter(data: Tensor, like: Tensor) -> nn.Parameter:
    """Return a parameter that requires a gradient if `like` does."""
    return nn.Parameter(
        data,
        requires_grad=like.requires_grad
        and (data.is_floating_point() or data.is_complex()),
    )


def _forget_gradient(parameter: Tensor) -> None:
    """Free the gradient of weights that leave the device: only the gradients of their inputs are needed."""
    parameter.grad = None


def _move(entry: PackedTensor, pool: HostPool) -> None:
    """Copy a tensor into the pool and point the model's object there; a page-locked tensor is not copied."""
    rest = entry.rest
    entry.home = pool.adopt(rest)
    if entry.home is not None:
        return
    slab, start, flat = pool.cut(entry.num_bytes)
    with torch.inference_mode(False), torch.no_grad():
        typed = flat.view(rest.dtype)
        shaped = torch.as_strided(
            typed, rest.shape, rest.stride(), typed.storage_offset()
        )
        shaped.copy_(rest)
        if rest.is_inference():
            rest = entry.rest = (
                _parameter(shaped, rest) if isinstance(rest, nn.Parameter) else shaped
            )
            entry.put(rest)
        else:
            rest.data = shaped
    entry.home = (slab, start)


def _load(entry: PackedTensor, pool: HostPool) -> Copy:
    """Return the copy that reads a tensor from its file into the pool, and point the model there."""
    piece = entry.piece
    assert piece is not None, "the tensor lies in a file"
    slab, start, flat = pool.cut(entry.num_bytes)
    shaped = flat.view(entry.rest.dtype).view(entry.rest.shape)
    entry.rest = (
        _parameter(shaped, entry.rest)
        if isinstance(entry.rest, nn.Parameter)
        else shaped
    )
    entry.put(entry.rest)
    entry.home, entry.piece, entry.to_host = (slab, start), None, False
    return Copy(flat, as_bytes(piece.data), piece.file)


def _storage_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor, in memory order."""
    return torch.as_strided(tensor.detach(), (tensor.numel(),), (1,)).view(torch.uint8)


def _segments(entries: Sequence[PackedTensor]) -> list[tuple[int, Tensor]]:
    """Return the ranges of page-locked host memory to copy from, neighbours in a slab joined; empty unless all is page-locked."""
    # offset in the pack, slab, start, stop
    found: list[tuple[int, Tensor, int, int]] = []
    for entry in entries:
        if entry.home is None or not entry.home[0].is_pinned():
            return []
        slab, start = entry.home
        stop = start + entry.num_bytes
        if found:
            offset, last, first, _ = found[-1]
            if slab is last and start - first == entry.offset - offset:
                found[-1] = (offset, slab, first, stop)
                continue
        found.append((entry.offset, slab, start, stop))
    return [(offset, slab[start:stop]) for offset, slab, start, stop in found]


def mapped_entry(
    rest: Tensor, places: list[tuple[Table, str]], piece: Piece, to_host: bool = False
) -> PackedTensor:
    """Return an entry whose bytes stay in a file or are read to the host; the model refers to the mapped file."""
    data = piece.data.reshape(rest.shape)
    fresh: Tensor = _parameter(data, rest) if isinstance(rest, nn.Parameter) else data
    entry = PackedTensor(
        fresh,
        places,
        Piece(data, piece.shape, piece.offset, piece.file),
        to_host=to_host,
        written=fresh._version,
    )
    entry.put(fresh)
    return entry
