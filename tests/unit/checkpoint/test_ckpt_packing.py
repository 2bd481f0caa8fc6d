"""Nested state survives the way to JSON and tensors and back, in both file formats."""

from __future__ import annotations

import collections
import datetime as dt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hasten.checkpoint.base import Blob
from hasten.checkpoint.format.formats import (
    encode_safetensors,
    encode_torch,
    read_tensors,
)
from hasten.checkpoint.format.packing import pack, unpack
from hasten.errors import CheckpointError, CorruptCheckpointError

VALUES: tuple[Any, ...] = (
    None,
    True,
    7,
    2**80,
    2.5,
    float("inf"),
    float("-inf"),
    "text",
    b"bytes",
    1 + 2j,
    (1, (2, 3)),
    [1, [2]],
    {1, 2},
    frozenset({3}),
    {"a": 1, "b": {"c": (1, 2)}},
    {1: "int key", ("t", 1): "tuple key"},
    {"$": "a key that looks like a tag", "of": 3},
    collections.OrderedDict(x=1),
    collections.Counter("aab"),
    collections.deque([1, 2], maxlen=5),
    torch.float16,
    torch.Size([2, 3]),
    torch.device("cpu"),
    dt.datetime(2026, 1, 2, 3, 4, 5, 6),
    dt.timedelta(days=1, seconds=0.5),
    Path("a/b"),
)


def write_blob(blob: Blob, path: Path) -> Path:
    encoded_segments = [
        s if isinstance(s, bytes) else bytes(s.reshape(-1).view(torch.uint8).numpy())
        for s in blob.segments
    ]
    path.write_bytes(b"".join(encoded_segments))
    assert path.stat().st_size == blob.size
    return path


@pytest.mark.parametrize("end", [".safetensors", ".bin"])
def test_every_supported_value_comes_back(tmp_path: Path, end: str) -> None:
    value = {f"v{i}": v for i, v in enumerate(VALUES)}
    data, tensors = pack(value)
    encode = encode_safetensors if end == ".safetensors" else encode_torch
    content = read_tensors(write_blob(encode(tensors, data), tmp_path / f"x{end}"))
    unpacked = unpack(
        content.data, {key: piece.data for key, piece in content.pieces.items()}
    )
    assert unpacked == value
    assert [type(v) for v in unpacked.values()] == [
        type(v) for v in value.values()
    ] or end == ".bin"


@pytest.mark.parametrize("end", [".safetensors", ".bin"])
@pytest.mark.parametrize(
    "dtype",
    [
        *(
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.float64,
            torch.complex64,
            torch.float8_e4m3fn,
        ),
        *(torch.int64, torch.int8, torch.uint8, torch.bool),
    ],
)
def test_tensors_of_every_shape_and_layout_are_bitwise_equal(
    tmp_path: Path, end: str, dtype: torch.dtype
) -> None:
    base = torch.randint(0, 2, (4, 6)).to(dtype)
    nchw = (
        torch.randint(0, 2, (2, 3, 4, 4))
        .to(torch.float32)
        .to(memory_format=torch.channels_last)
    )
    tree = {
        "whole": base,
        "strided": base.t(),
        "part": base[1:3, ::2],
        "none": base[:0],
        "one": base[0, 0],
        "cl": nchw,
    }
    data, tensors = pack({"in": [tree, np.arange(5), np.float64(2.0)]})
    encode = encode_safetensors if end == ".safetensors" else encode_torch
    content = read_tensors(write_blob(encode(tensors, data), tmp_path / f"x{end}"))
    unpacked = unpack(
        content.data, {key: piece.data for key, piece in content.pieces.items()}
    )["in"]
    for key, tensor in tree.items():
        assert unpacked[0][key].dtype == tensor.dtype
        assert torch.equal(
            unpacked[0][key].to(torch.complex64), tensor.to(torch.complex64)
        ), key
    assert np.array_equal(unpacked[1], np.arange(5))
    assert unpacked[2] == 2.0


def test_tied_tensors_are_stored_once_under_all_names(tmp_path: Path) -> None:
    shared = torch.randn(1000)
    tensors = {"a": shared, "b": torch.randn(3), "c": shared}
    blob = encode_safetensors(tensors)
    assert blob.size < 5000
    content = read_tensors(write_blob(blob, tmp_path / "x.safetensors"))
    assert content.aliases == {"c": "a"}
    content = read_tensors(write_blob(encode_torch(tensors), tmp_path / "x.bin"))
    assert (tmp_path / "x.bin").stat().st_size < 6500
    assert torch.equal(content.pieces["c"].data, shared)


def test_torch_file_is_what_torch_load_reads(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    data, tensors = pack(optimizer.state_dict())
    path = write_blob(encode_torch(tensors, data), tmp_path / "optimizer.bin")
    loaded = torch.load(path, weights_only=True)
    torch.optim.AdamW(model.parameters()).load_state_dict(loaded)
    assert torch.equal(
        loaded["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )


class Pair(NamedTuple):
    """A tuple whose class would be lost."""

    a: int
    b: int


class Unpackable:
    """Something only pickle could store."""


@pytest.mark.parametrize(
    "value", [Unpackable(), object(), lambda: 1, torch.nn.Linear(1, 1), Pair(1, 2)]
)
def test_what_needs_pickle_is_refused_by_name(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"deep/here holds a .*Return tensors"):
        pack({"deep": {"here": value}})


@pytest.mark.parametrize(
    "data",
    [
        {"$": "tensor", "key": "absent"},
        {"$": "unknown", "of": []},
        {"$": "dtype", "of": "load"},
        {"$": "bytes", "of": "***"},
        {"$": "tuple"},
        {"$": "dict", "of": [[1]]},
        {"$": "dict", "of": [[[1], 2]]},
        {"$": "deque", "of": [], "maxlen": -1},
        {"$": "complex", "of": [1]},
        {"$": "datetime", "of": "yesterday"},
        {"$": ["tuple"], "of": []},
        {"$": "device", "of": "nonsense"},
        {"$": "size", "of": ["x"]},
    ],
)
def test_edited_structure_is_a_typed_error(data: Any) -> None:
    with pytest.raises(CorruptCheckpointError):
        unpack(data, {})
