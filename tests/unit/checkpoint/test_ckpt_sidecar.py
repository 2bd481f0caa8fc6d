"""A torch file read by its sidecar equals the same file unpickled, and a sidecar that lies is found out."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hasten import Accelerator
from hasten.checkpoint.base import Blob
from hasten.checkpoint.format.formats import (
    SUFFIX,
    WORTH_IT,
    encode_with_sidecar,
    read_by_sidecar,
    read_tensors,
)
from hasten.checkpoint.format.packing import pack, unpack
from hasten.checkpoint.store.disk import as_bytes
from hasten.errors import CorruptCheckpointError


def write(blob: Blob, path: Path) -> Path:
    parts = [
        s if isinstance(s, bytes) else as_bytes(s).numpy().tobytes()
        for s in blob.segments
    ]
    path.write_bytes(b"".join(parts))
    return path


def pair(folder: Path, state: Any) -> tuple[Path, Path]:
    data, tensors = pack(state)
    blob, sidecar = encode_with_sidecar(tensors, data)
    assert sidecar is not None
    return write(blob, folder / "x.bin"), write(sidecar, folder / f"x.bin{SUFFIX}")


def flat(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [item for key in state for item in (key, *flat(state[key]))]
    if isinstance(state, (list, tuple)):
        return [type(state), *(item for value in state for item in flat(value))]
    return [state]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and torch.equal(one, other)
        )
    return type(one) is type(other) and bool(one == other)


def many(extra: Any = None) -> dict[str, Any]:
    dtypes = (
        torch.float32,
        torch.bfloat16,
        torch.int64,
        torch.bool,
        torch.float8_e4m3fn,
        torch.uint8,
    )
    shapes = ((3, 5), (), (0, 4), (7,), (2, 1, 3))
    tied = torch.randn(11)
    state: dict[str, Any] = {
        "tied": [tied, tied],
        "strided": torch.randn(4, 6).t(),
        "extra": extra,
    }
    for i in range(WORTH_IT):
        shape = shapes[i % len(shapes)]
        state[f"t{i}"] = (
            torch.randint(0, 2, shape).to(dtypes[i % len(dtypes)]),
            i,
            0.5 * i,
            float("inf"),
        )
    return state


def test_reading_by_sidecar_equals_unpickling(tmp_path: Path) -> None:
    kinds: tuple[Any, ...] = (
        torch.optim.AdamW,
        partial(torch.optim.SGD, momentum=0.9),
        torch.optim.Rprop,
        None,
    )
    for kind in kinds:
        if kind is None:
            state: Any = many({"nested": {5: (1, None, "text")}, 7: b"bytes"})
        else:
            net = nn.Sequential(*(nn.Linear(3, 2) for _ in range(WORTH_IT)))
            optimizer = kind(net.parameters(), lr=0.1)
            for parameter in net.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            state = optimizer.state_dict()
        path, sidecar = pair(tmp_path, state)
        found = [read_by_sidecar(path, sidecar), read_tensors(path)]
        values = [
            unpack(c.data, {key: piece.data for key, piece in c.pieces.items()})
            for c in found
        ]
        mine, theirs, original = flat(values[0]), flat(values[1]), flat(state)
        assert len(mine) == len(theirs) == len(original)
        for one, other, was in zip(mine, theirs, original, strict=True):
            assert same(one, was), f"{kind}: {one} was {was}"
            assert same(other, was), f"{kind}: {other} was {was}"


LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "size": lambda s: s.update(size=s["size"] + 1),
    "negative": lambda s: s["tensors"]["t0/0"].__setitem__(2, -8),
    "past the end": lambda s: s["tensors"]["t0/0"].__setitem__(2, s["size"] - 1),
    "huge shape": lambda s: s["tensors"]["t0/0"].__setitem__(1, [2**40, 2**40]),
    "negative shape": lambda s: s["tensors"]["t0/0"].__setitem__(1, [-3, -5]),
    "dtype": lambda s: s["tensors"]["t0/0"].__setitem__(0, "F128"),
    "kind": lambda s: s["tensors"].__setitem__("t0/0", "text"),
    "unknown key": lambda s: s.update(run="me"),
    "no table": lambda s: s.pop("tensors"),
    "offset text": lambda s: s["tensors"]["t0/0"].__setitem__(2, "8"),
}


def test_a_sidecar_that_lies_is_found_out(tmp_path: Path) -> None:
    path, sidecar = pair(tmp_path, many())
    honest = sidecar.read_bytes()
    for lie in LIES.values():
        told = json.loads(honest)
        lie(told)
        sidecar.write_text(json.dumps(told))
        with pytest.raises(CorruptCheckpointError, match="does not describe"):
            read_by_sidecar(path, sidecar)
    for length in (0, 1, len(honest) // 2, len(honest) - 1):
        sidecar.write_bytes(honest[:length])
        with pytest.raises(CorruptCheckpointError, match="does not describe"):
            read_by_sidecar(path, sidecar)


def test_a_run_loads_without_unpickling_and_the_file_stands_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start() -> tuple[Accelerator, Any, Any]:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))
        return accelerator, *accelerator.prepare(
            net, torch.optim.AdamW(net.parameters())
        )

    accelerator, net, optimizer = start()
    accelerator.backward(net(torch.randn(2, 4)).sum())
    optimizer.step()
    place = Path(accelerator.save_state(tmp_path / "c"))
    assert (place / f"optimizer.bin{SUFFIX}").is_file()
    saved = flat(optimizer.state_dict())
    again, _, other = start()

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("unpickled")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", refuse)
        again.load_state(place)
    assert all(
        same(one, was) for one, was in zip(flat(other.state_dict()), saved, strict=True)
    )
    native = [
        x
        for x in flat(torch.load(place / "optimizer.bin", weights_only=True))
        if isinstance(x, torch.Tensor)
    ]
    tensors = [x for x in saved if isinstance(x, torch.Tensor)]
    assert all(same(one, was) for one, was in zip(native, tensors, strict=True))
