"""Live tensors are filled byte for byte from files, however they lie there and whatever becomes of the files."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from hasten.checkpoint import reshard
from hasten.checkpoint.format.formats import (
    Piece,
    encode_safetensors,
    encode_torch,
    read_safetensors,
    read_torch,
)
from hasten.checkpoint.format.packing import pack
from hasten.checkpoint.reshard import Copy, plan_copies, run_copies
from hasten.checkpoint.store.disk import Disk, write_files
from hasten.errors import CheckpointError, CorruptCheckpointError

SHAPES = ((3,), (1,), (70_000,), (2, 5), (), (1000, 7), (300, 301), (1,), (9, 9, 9))


def random_tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.float64, torch.uint8)
    return {
        f"{i}": (torch.randn(shape, generator=generator) * 50).to(
            dtypes[i % len(dtypes)]
        )
        for i, shape in enumerate(SHAPES)
    }


def stored_pieces(
    folder: Path, values: dict[str, Tensor], kind: str
) -> dict[str, Piece]:
    if kind == "safetensors":
        write_files(folder, {"f.safetensors": encode_safetensors(values)}, Disk())
        return dict(read_safetensors(folder / "f.safetensors").pieces)
    data, named = pack(values | {f"s{i}": torch.tensor(float(i)) for i in range(80)})
    write_files(folder, {"f.bin": encode_torch(named, data)}, Disk())
    return dict(read_torch(folder / "f.bin").pieces)


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
@pytest.mark.parametrize(
    "chunk",
    [pytest.param(64, marks=pytest.mark.exhaustive), 1000, 65_536, 16 * 1024**2],
)
def test_tensors_of_all_sizes_come_back(
    tmp_path: Path, kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reshard, "CHUNK_BYTES", chunk)
    for seed in range(3):
        folder = tmp_path / f"{seed}"
        folder.mkdir()
        values = random_tensors(seed)
        pieces = stored_pieces(folder, values, kind)
        names = sorted(values)
        random.Random(seed).shuffle(names)
        live = {name: torch.zeros_like(values[name]) for name in names}
        run_copies(
            [
                copy
                for name in names
                for copy in plan_copies(name, live[name], [pieces[name]])
            ],
            threads=3,
        )
        for name, value in values.items():
            assert torch.equal(live[name], value), (
                f"{name} of shape {tuple(value.shape)}"
            )


def test_other_layouts_and_dtypes_are_converted(tmp_path: Path) -> None:
    value = torch.randn(40, 30)
    pieces = stored_pieces(tmp_path, {"w": value}, "safetensors")
    turned = torch.zeros(30, 40).t()
    half = torch.zeros(40, 30, dtype=torch.bfloat16)
    row_view = torch.zeros(100, 30)[10:50]
    run_copies(
        [
            copy
            for live in (turned, half, row_view)
            for copy in plan_copies("w", live, [pieces["w"]])
        ]
    )
    assert torch.equal(turned, value)
    assert torch.equal(half, value.bfloat16())
    assert torch.equal(row_view, value)


def test_many_small_copies_and_large_ones_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reshard, "CHUNK_BYTES", 1000)
    values = {
        f"{i}": torch.randn(size) for i, size in enumerate([1, 300, 1, 1, 250, 900, 2])
    }
    live = {name: torch.zeros_like(value) for name, value in values.items()}
    copies = [Copy(live[name], value) for name, value in values.items()]
    run_copies(copies)
    assert all(torch.equal(live[name], value) for name, value in values.items())


@pytest.mark.parametrize("fate", ["deleted", "replaced"])
def test_a_file_that_goes_away_is_still_the_one_that_was_opened(
    tmp_path: Path, fate: str
) -> None:
    values = random_tensors(0)
    pieces = stored_pieces(tmp_path, values, "safetensors")
    path = tmp_path / "f.safetensors"
    path.rename(tmp_path / "gone")
    if fate == "replaced":
        path.write_bytes(bytes((tmp_path / "gone").stat().st_size))
    (tmp_path / "gone").unlink()
    live = {name: torch.zeros_like(value) for name, value in values.items()}
    run_copies(
        [
            copy
            for name in values
            for copy in plan_copies(name, live[name], [pieces[name]])
        ]
    )
    assert all(torch.equal(live[name], value) for name, value in values.items())


def test_a_file_cut_off_under_way_is_an_error_that_names_it(tmp_path: Path) -> None:
    pieces = stored_pieces(tmp_path, {"w": torch.randn(50_000)}, "safetensors")
    copies = plan_copies("w", torch.zeros(50_000), [pieces["w"]])
    os.truncate(tmp_path / "f.safetensors", 4096)
    with pytest.raises(
        CorruptCheckpointError, match=r"f\.safetensors: \d+ of 200000 bytes"
    ):
        run_copies(copies)


def test_a_disk_that_fails_is_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = stored_pieces(tmp_path, {"w": torch.randn(5000)}, "safetensors")

    def failing(fd: int, views: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(reshard, "read_all", failing)
    weight = torch.nn.Parameter(torch.randn(5000))
    loss = (weight * weight).sum()
    with pytest.raises(
        CheckpointError,
        match=r"f\.safetensors: cannot be read any more .*Input/output error",
    ):
        run_copies(plan_copies("w", weight, [pieces["w"]]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(loss)


def test_conjugate_and_negative_views_get_the_numbers_that_were_saved(
    tmp_path: Path,
) -> None:
    value = torch.polar(torch.ones(40), torch.arange(40.0))
    pieces = stored_pieces(
        tmp_path, {"c": value, "n": value.imag.clone()}, "safetensors"
    )
    turned, negative = (
        torch.zeros(40, dtype=torch.complex64).conj(),
        torch.zeros(40, dtype=torch.complex64).conj().imag,
    )
    assert negative.is_neg()
    run_copies(
        [
            *plan_copies("c", turned, [pieces["c"]]),
            *plan_copies("n", negative, [pieces["n"]]),
        ]
    )
    assert torch.equal(turned.resolve_conj(), value)
    assert torch.equal(negative.resolve_neg(), value.imag)


def test_tensors_made_of_others_are_filled(tmp_path: Path) -> None:
    value = torch.randn(30)
    pieces = stored_pieces(tmp_path, {"w": value}, "safetensors")
    double: Any = TwoTensor(torch.zeros(30), torch.zeros(30))  # type: ignore[no-untyped-call]  # torch's own example
    run_copies(plan_copies("w", double, [pieces["w"]]))
    assert torch.equal(double.a, value)
    assert torch.equal(double.b, value)


def test_nothing_is_loaded_into_no_memory(tmp_path: Path) -> None:
    pieces = stored_pieces(tmp_path, {"w": torch.randn(30)}, "safetensors")
    with pytest.raises(CheckpointError, match="on the meta device"):
        plan_copies("w", torch.zeros(30, device="meta"), [pieces["w"]])


def test_autograd_notices_that_a_weight_was_replaced(tmp_path: Path) -> None:
    pieces = stored_pieces(tmp_path, {"w": torch.randn(50)}, "safetensors")
    weight = torch.nn.Parameter(torch.randn(50))
    loss = (weight * weight).sum()
    run_copies(plan_copies("w", weight, [pieces["w"]]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(loss)
