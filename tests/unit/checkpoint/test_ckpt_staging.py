"""Host copies of a save: equal bytes, one copy of each memory, whatever was announced before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hasten.checkpoint import async_writer
from hasten.checkpoint.async_writer import HostStaging
from hasten.checkpoint.base import Blob
from hasten.checkpoint.store.disk import as_bytes


def bytes_of_blob(blob: Blob) -> bytes:
    return b"".join(
        segment if isinstance(segment, bytes) else as_bytes(segment).numpy().tobytes()
        for segment in blob.segments
    )


def blob_of(*segments: bytes | Tensor) -> Blob:
    sizes = [
        len(segment)
        if isinstance(segment, bytes)
        else segment.numel() * segment.element_size()
        for segment in segments
    ]
    return Blob(segments, sum(sizes))


def test_copies_do_not_follow_the_originals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Announced, not announced, or only some; chunks smaller than a tensor; again with the same memory."""
    torch.manual_seed(0)
    for chunk_bytes in (64, 1000, 1 << 20):
        monkeypatch.setattr(async_writer, "CHUNK_BYTES", chunk_bytes)
        staging = HostStaging()
        for announced in (0, 1, 2, 3):
            tensors = [
                torch.randn(37),
                torch.arange(5),
                torch.randn(8, 3).t().contiguous(),
                torch.zeros(0),
            ]
            blobs = {
                "a": blob_of(b"head", tensors[0], tensors[3], b"", tensors[1]),
                "b": blob_of(tensors[2]),
            }
            original_bytes = {name: bytes_of_blob(blob) for name, blob in blobs.items()}
            if announced:
                staging.begin([*tensors[:announced], torch.randn(6, 6).t()])
            staged = staging.end(blobs)
            for tensor in tensors:
                tensor.zero_()
            assert {
                name: bytes_of_blob(blob) for name, blob in staged.items()
            } == original_bytes
            assert {name: blob.size for name, blob in staged.items()} == {
                n: b.size for n, b in blobs.items()
            }


def test_one_copy_of_tied_memory() -> None:
    weight = torch.randn(100)
    staging = HostStaging()
    staging.begin([weight, weight.detach()])
    staged = staging.end({"a": blob_of(weight), "b": blob_of(weight.detach())})
    assert staging.num_bytes >= 400
    (first,), (second,) = staged["a"].segments, staged["b"].segments
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    assert first.data_ptr() == second.data_ptr()


def test_a_save_given_up_leaves_nothing_behind() -> None:
    staging = HostStaging()
    staging.begin([torch.randn(1000)])
    staging.discard()
    value = torch.randn(10)
    staged = staging.end({"a": blob_of(value)})
    assert bytes_of_blob(staged["a"]) == value.numpy().tobytes()
