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

    resting_tensor: Tensor
    places: list[tuple[Table, str]]
    piece: Piece | None = None
    """Piece of a file, for weights that stay on the disk."""
    offset: int = 0
    home: tuple[Tensor, int] | None = None
    """The slab of host memory and the offset of the bytes in it."""
    to_host: bool = False
    """True if the tensor is in a file and is read to host memory when the pack is settled."""
    file_version: int = 0
    """Version of the resting tensor that equals the file."""

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.resting_tensor.numel() * self.resting_tensor.element_size()

    def replace_in_model(self, tensor: Tensor) -> None:
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
        if not is_plain(entry.resting_tensor):
            self.loose.append(entry)
            return
        entry.offset = self.num_bytes
        self.entries.append(entry)
        self.num_bytes += aligned_bytes(entry.num_bytes)

    def move_to_host(self, host_pool: HostPool) -> None:
        """Move tensors that rest in host memory into the pool; the model's tensor objects stay the same where possible."""
        file_copies = []
        for entry in self.entries:
            if entry.to_host:
                file_copies.append(_plan_read(entry, host_pool))
        if file_copies:
            run_copies(file_copies)
        for entry in self.entries:
            if entry.piece is None and entry.home is None:
                _move_to_pool(entry, host_pool)
        self.segments = _pinned_segments(self.entries)

    def weight_versions(self) -> tuple[int, ...]:
        """Return the tensors' versions, which change when a resting tensor is written to."""
        return tuple(entry.resting_tensor._version for entry in self.entries)

    def read_into(self, target: Tensor, threads: int | None = None) -> None:
        """Fill flat host memory with the pack's bytes, read from files in parallel."""
        file_copies = []
        for entry in self.entries:
            target_bytes = target[entry.offset : entry.offset + entry.num_bytes]
            if (
                entry.piece is None
                or entry.resting_tensor._version != entry.file_version
            ):
                copy_bytes(target_bytes, _storage_bytes(entry.resting_tensor))
            else:
                file_copies.append(
                    Copy(target_bytes, as_bytes(entry.piece.data), entry.piece.file)
                )
        if file_copies:
            run_copies(file_copies, threads)

    def views_at(self, buffer: Tensor, start_byte: int) -> list[Tensor]:
        """Return the tensors as views of `buffer` from byte `start` on, as parameters where the originals are."""
        gradient_flags = [entry.resting_tensor.requires_grad for entry in self.entries]
        pack_views = self.views.get(start_byte)
        if (
            pack_views is None
            or [view.requires_grad for view in pack_views] != gradient_flags
        ):
            with torch.inference_mode(False), torch.no_grad():
                pack_views = []
                for entry in self.entries:
                    pack_views.append(_make_view(entry, buffer, start_byte))
            if len(self.views) >= _VIEWS_KEPT:
                self.views.pop(next(iter(self.views)))
            self.views[start_byte] = pack_views
        return pack_views


def is_plain(tensor: Tensor) -> bool:
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


def _make_view(entry: PackedTensor, buffer: Tensor, start_byte: int) -> Tensor:
    resting_tensor = entry.resting_tensor
    flat_bytes = buffer[
        start_byte + entry.offset : start_byte + entry.offset + entry.num_bytes
    ].view(resting_tensor.dtype)
    # .data: separate version counters, since copies of other packs count as writes to the whole buffer
    shaped_tensor = torch.as_strided(
        flat_bytes,
        resting_tensor.shape,
        resting_tensor.stride(),
        flat_bytes.storage_offset(),
    ).data
    if not isinstance(resting_tensor, nn.Parameter):
        return shaped_tensor
    parameter = _make_parameter(shaped_tensor, resting_tensor)
    if parameter.requires_grad:
        # torch leaves it untyped
        register: Callable[..., object] = parameter.register_post_accumulate_grad_hook
        register(_forget_gradient)
    return parameter


def _make_parameter(data: Tensor, like: Tensor) -> nn.Parameter:
    """Return a parameter that requires a gradient if `like` does."""
    return nn.Parameter(
        data,
        requires_grad=like.requires_grad
        and (data.is_floating_point() or data.is_complex()),
    )


def _forget_gradient(parameter: Tensor) -> None:
    """Free the gradient of weights that leave the device: only the gradients of their inputs are needed."""
    parameter.grad = None


def _move_to_pool(entry: PackedTensor, host_pool: HostPool) -> None:
    """Copy a tensor into the pool and point the model's object there; a page-locked tensor is not copied."""
    resting_tensor = entry.resting_tensor
    entry.home = host_pool.adopt_tensor(resting_tensor)
    if entry.home is not None:
        return
    host_slab, start_byte, flat_bytes = host_pool.cut_bytes(entry.num_bytes)
    with torch.inference_mode(False), torch.no_grad():
        typed_elements = flat_bytes.view(resting_tensor.dtype)
        shaped_tensor = torch.as_strided(
            typed_elements,
            resting_tensor.shape,
            resting_tensor.stride(),
            typed_elements.storage_offset(),
        )
        shaped_tensor.copy_(resting_tensor)
        if resting_tensor.is_inference():
            if isinstance(resting_tensor, nn.Parameter):
                shaped_tensor = _make_parameter(shaped_tensor, resting_tensor)
            resting_tensor = entry.resting_tensor = shaped_tensor
            entry.replace_in_model(resting_tensor)
        else:
            resting_tensor.data = shaped_tensor
    entry.home = (host_slab, start_byte)


def _plan_read(entry: PackedTensor, host_pool: HostPool) -> Copy:
    """Return the copy that reads a tensor from its file into the pool, and point the model there."""
    file_piece = entry.piece
    assert file_piece is not None, "the tensor lies in a file"
    host_slab, start_byte, flat_bytes = host_pool.cut_bytes(entry.num_bytes)
    shaped_tensor = flat_bytes.view(entry.resting_tensor.dtype).view(
        entry.resting_tensor.shape
    )
    if isinstance(entry.resting_tensor, nn.Parameter):
        entry.resting_tensor = _make_parameter(shaped_tensor, entry.resting_tensor)
    else:
        entry.resting_tensor = shaped_tensor
    entry.replace_in_model(entry.resting_tensor)
    entry.home = (host_slab, start_byte)
    entry.piece = None
    entry.to_host = False
    return Copy(flat_bytes, as_bytes(file_piece.data), file_piece.file)


def _storage_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor, in memory order."""
    return torch.as_strided(tensor.detach(), (tensor.numel(),), (1,)).view(torch.uint8)


def _pinned_segments(entries: Sequence[PackedTensor]) -> list[tuple[int, Tensor]]:
    """Return the ranges of page-locked host memory to copy from, neighbours in a slab joined; empty unless all is page-locked."""
    # offset in the pack, slab, start, stop
    joined_ranges: list[tuple[int, Tensor, int, int]] = []
    for entry in entries:
        if entry.home is None or not entry.home[0].is_pinned():
            return []
        host_slab, start_byte = entry.home
        stop_byte = start_byte + entry.num_bytes
        if joined_ranges:
            offset, last, first, _ = joined_ranges[-1]
            if host_slab is last and start_byte - first == entry.offset - offset:
                joined_ranges[-1] = (offset, host_slab, first, stop_byte)
                continue
        joined_ranges.append((entry.offset, host_slab, start_byte, stop_byte))
    host_ranges = []
    for offset, host_slab, start_byte, stop_byte in joined_ranges:
        host_ranges.append((offset, host_slab[start_byte:stop_byte]))
    return host_ranges


def mapped_entry(
    resting_tensor: Tensor,
    table_places: list[tuple[Table, str]],
    file_piece: Piece,
    to_host: bool = False,
) -> PackedTensor:
    """Return an entry whose bytes stay in a file or are read to the host; the model refers to the mapped file."""
    file_data = file_piece.data.reshape(resting_tensor.shape)
    if isinstance(resting_tensor, nn.Parameter):
        mapped_tensor: Tensor = _make_parameter(file_data, resting_tensor)
    else:
        mapped_tensor = file_data
    entry = PackedTensor(
        mapped_tensor,
        table_places,
        Piece(file_data, file_piece.shape, file_piece.offset, file_piece.file),
        to_host=to_host,
        file_version=mapped_tensor._version,
    )
    entry.replace_in_model(mapped_tensor)
    return entry
