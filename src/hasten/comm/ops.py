"""Collectives on trees: gather, reduce, broadcast and pad nested structures of tensors.

Every operation starts with one exchange of headers of a fixed size. Ranks that must agree but do not raise MismatchError on every
rank with a table of their inputs, instead of a hang or garbage. Gathered CPU tensors of a few hundred bytes are sent with the header, so
that a metric costs one round trip; everything else follows in a separate exchange.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from hasten import trees
from hasten.comm.base import Comm, ReduceKind
from hasten.errors import CommError, MismatchError
from hasten.trees import Tree

_PLAIN = (Tensor, torch.nn.Parameter)
_ENVELOPE_BYTES: Final = 1024
_NUM_SIZES: Final = 14
_HEADER: Final = struct.Struct(f"<{2 + _NUM_SIZES}q")
"""A digest of operation, structure, shapes and dtypes; the bytes of the tensors; and sizes that may differ between ranks."""
_ROOM: Final = _ENVELOPE_BYTES - _HEADER.size


def gather(tree: Tree, comm: Comm) -> Tree:
    """Return every rank's tensors concatenated along the first dimension; 0-dim tensors become rows."""
    if comm.size == 1:
        return trees.map_tensors(_rows, tree)
    met = _meet("gather", tree, comm, carry=True)
    if met.contents is not None:
        return trees.replace_tensors(tree, _taken_out(trees.tensors(tree), met))
    return trees.map_tensors(lambda x: comm.all_gather(_rows(x)).flatten(0, 1), tree)


def gather_ragged(tree: Tree, comm: Comm) -> Tree:
    """Concatenate like `gather`, for ranks whose tensors differ in the size of the first dimension."""
    if comm.size == 1:
        return trees.map_tensors(_rows, tree)
    met = _meet("gather_ragged", tree, comm, free_dim=0, carry=True)
    if met.contents is not None:
        return trees.replace_tensors(
            tree, _taken_out(trees.tensors(tree), met, ragged=True)
        )
    sizes = iter(met.sizes)
    return trees.map_tensors(lambda x: _gather_rows(_rows(x), next(sizes), comm), tree)


def _gather_rows(x: Tensor, sizes: Sequence[int], comm: Comm) -> Tensor:
    most = max(sizes)
    if min(sizes) == most:
        return comm.all_gather(x).flatten(0, 1)
    padded = x.new_zeros((most, *x.shape[1:]))
    padded[: x.shape[0]] = x
    return torch.cat(
        [part[:size] for part, size in zip(comm.all_gather(padded), sizes, strict=True)]
    )


def reduce(
    tree: Tree, comm: Comm, kind: ReduceKind = "sum", scale: float = 1.0
) -> Tree:
    """Return every tensor reduced over the ranks by sum, mean, min or max, times `scale`."""
    if kind not in ("sum", "mean", "min", "max"):
        raise CommError(
            f"reduce kind {kind!r} is unknown; use one of 'sum', 'mean', 'min', 'max'."
        )
    if kind in ("min", "max") and any(x.is_complex() for x in trees.tensors(tree)):
        raise CommError(
            f"{kind} of complex tensors has no meaning; reduce their absolute values instead."
        )
    _meet(f"reduce {kind}", tree, comm)
    if scale == 1.0:
        return trees.map_tensors(lambda x: comm.all_reduce(x, kind), tree)
    return trees.map_tensors(lambda x: comm.all_reduce(x, kind) * scale, tree)


def broadcast(tree: Tree, comm: Comm, src: int = 0) -> Tree:
    """Return the tensors of rank `src`; every rank must pass tensors of the same shapes."""
    _meet(f"broadcast from {src}", tree, comm)
    return trees.map_tensors(lambda x: comm.broadcast(x, src), tree)


def pad_across(
    tree: Tree, comm: Comm, dim: int = 0, pad_index: float = 0, pad_first: bool = False
) -> Tree:
    """Return every tensor padded with `pad_index` along `dim` to the largest size on any rank."""
    sizes = iter(
        _meet(f"pad_across dim {dim}", tree, comm, free_dim=dim, alike=False).sizes
    )

    def pad(x: Tensor) -> Tensor:
        most = max(next(sizes))
        if not -x.ndim <= dim < x.ndim or x.shape[dim] == most:
            return x
        out = x.new_full(
            [most if d == dim % x.ndim else n for d, n in enumerate(x.shape)], pad_index
        )
        start = most - x.shape[dim] if pad_first else 0
        out.narrow(dim, start, x.shape[dim]).copy_(x)
        return out

    return trees.map_tensors(pad, tree)


def gather_object(obj: Any, comm: Comm) -> list[Any]:  # Any: the caller's objects
    """Return a list of every rank's object; if every rank passes a list, the concatenated lists."""
    gathered = comm.all_gather_object(obj)
    if all(isinstance(part, list) for part in gathered):
        return [item for part in gathered for item in part]
    return gathered


# Any: the caller's objects
def broadcast_object_list(objects: list[Any], comm: Comm, src: int = 0) -> list[Any]:
    """Return the list with its items replaced in place by those of rank `src`."""
    objects[:] = comm.broadcast_object(objects, src)
    return objects


def _rows(x: Tensor) -> Tensor:
    return x.reshape(1) if x.ndim == 0 else x


class _Met(NamedTuple):
    """Result of one exchange of headers."""

    sizes: list[tuple[int, ...]]
    """For each tensor, every rank's size along the free dimension."""
    contents: list[memoryview] | None = None
    """Every rank's tensors as bytes; None if they do not all fit beside the headers."""


def _meet(
    op: str,
    tree: Tree,
    comm: Comm,
    free_dim: int | None = None,
    carry: bool = False,
    alike: bool = True,
) -> _Met:
    """Raise unless all ranks pass the same structure; with `carry`, small tensors are sent with the header.

    Without `alike` the tensors have as many dimensions on every rank, of any size.
    Raises: MismatchError on every rank. Ranks: every rank.
    """
    tensors = [tree] if isinstance(tree, Tensor) else trees.tensors(tree)
    sizes = (
        [1] * len(tensors)
        if free_dim is None
        else [_size(x, free_dim) for x in tensors]
    )
    if comm.size == 1:
        return _Met([(size,) for size in sizes])
    fits_header = len(sizes) <= _NUM_SIZES
    num_bytes = _num_bytes(tensors) if carry and fits_header else -1
    shown_sizes = sizes if fits_header else []
    padding = [0] * (_NUM_SIZES - len(shown_sizes))
    header = (
        _digest(_describe(op, tree, free_dim, alike)),
        num_bytes,
        *shown_sizes,
        *padding,
    )
    content = _content(tensors) if 0 <= num_bytes <= _ROOM else b""
    envelope = bytearray(
        (_HEADER.pack(*header) + content).ljust(_ENVELOPE_BYTES, b"\0")
    )
    rows = [
        memoryview(row)
        for row in comm.all_gather(
            torch.frombuffer(envelope, dtype=torch.uint8)
        ).numpy()
    ]
    headers = [_HEADER.unpack_from(row) for row in rows]
    if len({digest for digest, *_ in headers}) > 1:
        raise _mismatch(op, comm.all_gather_object(_describe(op, tree, None)), comm)
    if not fits_header:
        gathered = comm.all_gather(torch.tensor(sizes, dtype=torch.int64))
        return _Met([tuple(row) for row in gathered.T.tolist()])
    fit = all(0 <= carried <= _ROOM for _, carried, *_ in headers)
    contents = [row[_HEADER.size :] for row in rows] if fit else None
    sizes_of_ranks = (header[2 : 2 + len(sizes)] for header in headers)
    return _Met(list(zip(*sizes_of_ranks, strict=True)), contents)


def _digest(described: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(described.encode(), digest_size=8).digest(), "big", signed=True
    )


def _num_bytes(found: Sequence[Tensor]) -> int:
    """Return the bytes of the tensors, or -1 if they cannot be sent with a header, such as tensors on an accelerator."""
    if any(
        type(x) not in _PLAIN or not x.is_cpu or x.layout != torch.strided
        for x in found
    ):
        return -1
    return sum(x.nbytes for x in found)


def _content(found: Sequence[Tensor]) -> bytes:
    """Return the concatenated bytes of the tensors."""
    return b"".join([_raw(x).numpy().tobytes() for x in found])


def _taken_out(
    found: Sequence[Tensor], met: _Met, ragged: bool = False
) -> list[Tensor]:
    """Return the gathered tensors. Rows are contiguous in memory, so joining bytes joins rows."""
    assert met.contents is not None, "the tensors came with the headers"
    starts = [0] * len(met.contents)
    gathered = []
    for x, sizes in zip(found, met.sizes, strict=True):
        first, *rest = _rows(x).shape
        rows = sizes if ragged else (first,) * len(starts)
        row_bytes = x.element_size() * math.prod(rest)
        parts = []
        for rank, count in enumerate(rows):
            end = starts[rank] + count * row_bytes
            parts.append(met.contents[rank][starts[rank] : end])
            starts[rank] = end
        joined = bytearray().join(parts)
        shape = (sum(rows), *rest)
        gathered.append(
            torch.frombuffer(joined, dtype=x.dtype).reshape(shape)
            if joined
            else x.new_empty(shape)
        )
    return gathered


def _size(x: Tensor, dim: int | None) -> int:
    if dim is None or not -x.ndim <= dim < x.ndim:
        return 1
    return int(x.shape[dim])


def _describe(op: str, tree: Tree, free_dim: int | None, alike: bool = True) -> str:
    lines = [op]
    for path, leaf in trees.paths(tree):
        if isinstance(leaf, Tensor):
            shape = list(_rows(leaf).shape if free_dim == 0 else leaf.shape)
            if free_dim is not None and -len(shape) <= free_dim < len(shape):
                shape[free_dim] = -1
            shape = shape if alike else [-1] * len(shape)
            lines.append(
                f"{'.'.join(map(str, path)) or 'tensor'}: {shape} {str(leaf.dtype).removeprefix('torch.')}"
            )
    return "\n".join(lines)


def _mismatch(op: str, descriptions: Sequence[str], comm: Comm) -> MismatchError:
    rows = []
    for member, text in enumerate(descriptions):
        called, *lines = text.split("\n")
        rows.append(
            f"  rank {comm.ranks[member]}: {called} of "
            + ("; ".join(lines) or "no tensor")
        )
    return MismatchError(
        f"{op}: the ranks pass different inputs, so the result would be garbage or a hang.\n"
        + "\n".join(rows)
        + "\nPass equal structures, shapes and dtypes on every rank; for rows that differ in number use "
        "gather_for_metrics or a ragged gather, or pad_across_processes first."
    )


def _raw(x: Tensor) -> Tensor:
    """Return the tensor's bytes."""
    x = x.detach()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    flat = x.resolve_neg().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # one element of a column keeps the column's stride
        flat = torch.empty_like(flat, memory_format=torch.contiguous_format).copy_(flat)
    return flat.view(torch.uint8)
