"""Any layout can be read from any other: each element comes from exactly one piece."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hasten.checkpoint import reshard
from hasten.checkpoint.base import Slice
from hasten.checkpoint.format.formats import MappedFile, Piece
from hasten.checkpoint.reshard import (
    Copy,
    intersect_boxes,
    join_pieces,
    plan_copies,
    run_copies,
)
from hasten.checkpoint.store.disk import HostBuffer
from hasten.errors import CheckpointError, CorruptCheckpointError, OtherModelError


def boxes(
    shape: tuple[int, ...], cuts: tuple[int, ...]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, extent) of a grid of pieces, uneven like torch's chunking: the last ones may be short or empty."""
    per_dim = []
    for total, count in zip(shape, cuts, strict=True):
        step = -(-total // count)
        starts = [min(i * step, total) for i in range(count)]
        per_dim.append([(start, min(start + step, total) - start) for start in starts])
    grid = [tuple(zip(*combo, strict=True)) for combo in itertools.product(*per_dim)]
    return [(offset, extent) for offset, extent in grid]


@pytest.mark.parametrize("shape", [(7,), (8, 5), (4, 6, 3)])
def test_every_layout_reads_every_other_up_to_16_pieces(shape: tuple[int, ...]) -> None:
    full = torch.arange(float(torch.tensor(shape).prod())).reshape(shape)
    counts = (1, 2, 3, 4, 7, 16) if len(shape) == 1 else (1, 2, 4, 5)
    layouts = list(itertools.product(counts, repeat=len(shape)))
    sampled_layouts = layouts if len(shape) < 3 else random.Random(0).sample(layouts, 8)
    for old, new in itertools.product(sampled_layouts, sampled_layouts):
        pieces = [
            Piece(full[_index(o, e)].clone(), shape, o) for o, e in boxes(shape, old)
        ]
        for offset, extent in boxes(shape, new):
            target = torch.full(extent, -1.0)
            for copy in plan_copies("w", Slice(target, shape, offset), pieces):
                copy.target.copy_(copy.source)
            assert torch.equal(target, full[_index(offset, extent)]), (old, new, offset)


def _index(offset: tuple[int, ...], extent: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))


def test_overlap_is_symmetric_and_exact() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        a, b = ([rng.randrange(6) for _ in range(2)] for _ in range(2))
        n, m = ([rng.randrange(1, 5) for _ in range(2)] for _ in range(2))
        first_cells = {
            (i, j) for i in range(a[0], a[0] + n[0]) for j in range(a[1], a[1] + n[1])
        }
        second_cells = {
            (i, j) for i in range(b[0], b[0] + m[0]) for j in range(b[1], b[1] + m[1])
        }
        overlap = intersect_boxes(a, n, b, m)
        assert overlap == intersect_boxes(b, m, a, n)
        size = 0 if overlap is None else overlap[0][1] * overlap[1][1]
        assert size == len(first_cells & second_cells)
        assert (overlap is None) == (size == 0)


def test_missing_piece_and_wrong_shape_name_the_tensor() -> None:
    half = Piece(torch.zeros(2, 3), (4, 3), (0, 0))
    with pytest.raises(
        CorruptCheckpointError, match=r"layer\.w: the files hold 6 of the 12"
    ):
        plan_copies("layer.w", torch.empty(4, 3), [half])
    with pytest.raises(
        OtherModelError, match=r"layer\.w has shape \(5, 3\) here and \(4, 3\)"
    ):
        plan_copies("layer.w", torch.empty(5, 3), [half])
    halves = [half, Piece(torch.ones(2, 3), (4, 3), (2, 0))]
    assert torch.equal(
        join_pieces(halves, "w"), torch.cat([torch.zeros(2, 3), torch.ones(2, 3)])
    )


# -- reads -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def device_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let tensors on the host pass for those of an accelerator; return the waits for its copies."""
    waits: list[str] = []

    def devices_of(tensors: Iterable[Tensor]) -> list[torch.device]:
        return [tensor.device for tensor in tensors][:1]

    def finish_copies(devices: Iterable[torch.device]) -> None:
        waits.extend(map(str, devices))

    monkeypatch.setattr(reshard, "devices_of", devices_of)
    monkeypatch.setattr(reshard, "finish_copies", finish_copies)
    monkeypatch.setattr(reshard, "HostBuffer", lambda is_pinned: HostBuffer(False))
    monkeypatch.setattr(reshard, "worker_pool", lambda *_: ThreadPoolExecutor(2))
    return waits


def bytes_of_file(path: Path, size: int) -> tuple[MappedFile, Tensor]:
    generator = torch.Generator().manual_seed(size)
    content = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    path.write_bytes(content.numpy().tobytes())
    return MappedFile(path, size), content


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("is_deleted", [False, True])
def test_ranges_of_a_file_fill_parts_of_tensors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    on_device: bool,
    is_deleted: bool,
) -> None:
    waits = request.getfixturevalue("device_calls") if on_device else []
    monkeypatch.setattr(reshard, "_MAX_READ_BYTES", 1000)
    file, content = bytes_of_file(tmp_path / "data.bin", 9000)
    # several in one read, with gaps; exactly one read; several reads
    bounds = [
        (4, 104),
        (104, 300),
        (340, 700),
        (1000, 2000),
        (3001, 6432),
        (8990, 9000),
    ]
    targets = [torch.zeros(stop - start, dtype=torch.uint8) for start, stop in bounds]
    copies = [
        Copy(target, file.data[start:stop], file)
        for target, (start, stop) in zip(targets, bounds, strict=True)
    ]
    if is_deleted:
        file.path.unlink()
    run_copies(copies)
    for target, (start, stop) in zip(targets, bounds, strict=True):
        assert torch.equal(target, content[start:stop]), (start, stop)
    assert bool(waits) is on_device


def test_an_accelerator_is_copied_through_a_buffer_chunk_by_chunk(
    monkeypatch: pytest.MonkeyPatch, device_calls: list[str]
) -> None:
    monkeypatch.setattr(reshard, "CHUNK_BYTES", 300)
    source, target = torch.randn(250), torch.zeros(250)
    reshard._copy_to_host(target, source, HostBuffer())
    assert torch.equal(target, source)
    assert device_calls == ["cpu"] * 4


def test_a_buffer_serves_plain_copies_from_an_accelerator(
    device_calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, needs_buffer = torch.zeros(4), reshard._needs_buffer
    assert needs_buffer(torch.zeros(4), plain)
    assert not needs_buffer(torch.zeros(4, dtype=torch.float64), plain)
    assert not needs_buffer(torch.zeros(2, 2), plain)
    with_gaps = torch.zeros(8)[::2]
    assert not needs_buffer(with_gaps, plain)
    assert not needs_buffer(plain, with_gaps)
    monkeypatch.setattr(reshard, "devices_of", lambda tensors: [])
    assert not needs_buffer(torch.zeros(4), plain)


def test_a_copy_that_torch_refuses_is_an_error_of_the_checkpoint() -> None:
    with pytest.raises(CheckpointError, match="copying a tensor from the checkpoint"):
        run_copies([Copy(torch.zeros(2), torch.zeros(3))])
