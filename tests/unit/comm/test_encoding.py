"""Plain encoding: values come back with their types, and bytes of a stranger build nothing but plain values."""

from __future__ import annotations

import pickle
import random
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hasten.checkpoint.format.manifest import FileRecord
from hasten.comm import encoding
from hasten.comm.encoding import decode, encode
from hasten.errors import CommError
from hasten.runtime.mesh_plan import Axis
from hasten.runtime.topology import Topology

# Any in this file: values of every type.

LEAVES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        2**63 - 1,
        -(2**63),
        2**64,
        -(2**90),
        0.5,
        float("inf"),
        "",
        "ß\0",
        b"",
        b"\xff",
        2j,
    ),
    *(
        Path("/a/b"),
        torch.bfloat16,
        torch.device("cpu"),
        torch.Size((2, 3)),
        np.float32(1.5),
        np.int8(-3),
        Axis.TP,
    ),
    *(
        np.arange(6).reshape(2, 3),
        np.array("text"),
        np.zeros((0, 2)),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
    ),
    FileRecord(name="a", size=1, sums=("x",)),
)
DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint16,
    torch.bool,
    torch.complex64,
)


def is_same_value(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.device == b.device
            and a.requires_grad == b.requires_grad
            and torch.equal(a, b)
        )
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(is_same_value(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(is_same_value, a, b))
    return bool(a == b)


def random_value(draw: random.Random, depth: int) -> Any:
    """A random nested value."""
    kind = draw.randrange(8 if depth else 2)
    if kind == 0:
        return draw.choice(LEAVES)
    if kind == 1:
        shape = [draw.randrange(3) for _ in range(draw.randrange(3))]
        return torch.full(shape, draw.randrange(2)).to(draw.choice(DTYPES))
    members = [random_value(draw, depth - 1) for _ in range(draw.randrange(4))]
    keys = [draw.choice(("a", "b", 1, (2, None), Axis.CP)) for _ in members]
    match kind:
        case 2 | 3:
            return members
        case 4:
            return tuple(members)
        case 5:
            return {draw.randrange(9), "x"}
        case 6:
            return dict(zip(map(str, keys), members, strict=True))
        case _:
            return dict(zip(keys, members, strict=True))


def test_values_come_back_with_their_types() -> None:
    for seed in range(400):
        original = random_value(random.Random(seed), 4)
        assert is_same_value(decode(encode(original)), original), seed
    for leaf in LEAVES:
        assert is_same_value(decode(encode([leaf]))[0], leaf), leaf


def test_tensors_keep_layout_free_content_and_gradients() -> None:
    x = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
    y = decode(encode(x))
    assert torch.equal(x, y)
    assert y.requires_grad
    assert y.is_leaf
    assert torch.equal(
        decode(encode(torch.tensor([1 + 2j]).conj())), torch.tensor([1 - 2j])
    )


@dataclass
class UserClass:
    x: int = 1


class Text(str):
    __slots__ = ()


def test_what_cannot_be_expressed_is_named() -> None:
    loop: list[Any] = []
    loop.append(loop)
    deep: Any = 0
    for _ in range(100):
        deep = (deep,)
    cases: list[tuple[Any, str]] = [
        (UserClass(), "UserClass"),
        (OrderedDict(a=1), "OrderedDict"),
        (Text("a"), "Text"),
        (loop, "levels deep"),
        (deep, "levels deep"),
        ("\ud800", "surrogate"),
        (np.array([object()]), "dtype object"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.nn.Linear(1, 1), "Linear"),
        (print, "builtin"),
        (Topology(rank=1, world_size=2), "Topology"),  # checks itself when it is made
    ]
    for unsupported, words in cases:
        with pytest.raises(CommError, match=words):
            encode(unsupported)


def test_bytes_of_a_stranger_end_in_our_error_and_build_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse_to_unpickle(*args: object, **kw: object) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr(pickle, "loads", refuse_to_unpickle)
    monkeypatch.setattr(pickle, "load", refuse_to_unpickle)
    packed = msgspec.msgpack.encode
    ext = msgspec.msgpack.Ext
    hostile_messages: list[Any] = [
        ext(20, packed(["os", "system", ["true"]])),
        ext(20, packed(["hasten.testing.worker", "serve", [1]])),
        # a class of ours that is no record
        ext(20, packed(["hasten.launch.elastic.peers", "Watch", [1, 2]])),
        ext(20, packed(["hasten.runtime.topology", "Topology", [1]])),
        ext(21, packed(["hasten.runtime.mesh_plan", "Axis", "nothing"])),
        ext(10, packed(["load", [1], "cpu", False, b"x"])),
        ext(10, packed(["float32", [5], "cpu", False, b"1234"])),
        ext(14, packed(["|O", [1], b"12345678"])),
        ext(99, b""),
    ]
    for hostile_message in hostile_messages:
        with pytest.raises(CommError, match="cannot be decoded"):
            decode(packed(hostile_message))
    deep = b""
    for _ in range(20_000):
        deep = packed(ext(1, deep))
        if len(deep) > 100_000:
            break
    with pytest.raises(CommError):
        decode(deep)
    valid_message = encode({"a": [1, (2, torch.ones(3))], 3: np.arange(4)})
    draw = random.Random(0)
    for _ in range(3000):
        damaged = bytearray(valid_message[: draw.randrange(len(valid_message) + 1)])
        for _ in range(draw.randrange(4)):
            if damaged:
                damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        try:
            decode(bytes(damaged))
        except CommError:
            continue
    assert encoding.encode(1) == b"\x01"
