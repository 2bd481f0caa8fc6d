"""Trees: containers keep their kind, order and extras; leaves that are no tensors pass through."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hasten import trees

# the untyped kind is what users' collate functions return
Pair = namedtuple("Pair", ["a", "b"])


@dataclass(frozen=True)
class Frozen:
    x: Any
    label: str = "kept"


class Output(OrderedDict[str, Any]):
    """A dict subclass."""


class Encoding(UserDict[str, Any]):
    """A mapping that is not a dict, with a `.to` of its own."""

    def to(self, device: str) -> Encoding:
        return Encoding(
            {k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.items()}
        )


def samples() -> list[Any]:
    x = torch.arange(3.0)
    return [
        x,
        [x, None, 3],
        (x, "text"),
        Pair(x, {"b": x}),
        {"k": x, 2: [x]},
        OrderedDict(z=x, a=x),
        Output(y=x),
        Encoding(q=x),
        Frozen(x),
        [],
        {},
        None,
    ]


@pytest.mark.parametrize("tree", samples(), ids=lambda t: type(t).__name__)
def test_mapping_keeps_kind_and_values(tree: Any) -> None:
    doubled = trees.map_tensors(lambda x: x * 2, tree)
    assert type(doubled) is type(tree)
    original_leaves, doubled_leaves = trees.leaves(tree), trees.leaves(doubled)
    assert len(original_leaves) == len(doubled_leaves)
    for old, new in zip(original_leaves, doubled_leaves, strict=True):
        if isinstance(old, Tensor):
            assert torch.equal(new, old * 2)
        else:
            assert new == old


def test_default_factory_and_order_survive() -> None:
    tree: defaultdict[str, list[Tensor]] = defaultdict(
        list, z=[torch.ones(1)], a=[torch.ones(2)]
    )
    mapped = trees.map_tensors(lambda x: x + 1, tree)
    assert mapped.default_factory is list
    assert list(mapped) == ["z", "a"]


def test_paths_name_every_leaf() -> None:
    tree = {"a": [torch.ones(1), Pair(1, None)]}
    assert [path for path, _ in trees.paths(tree)] == [
        ("a", 0),
        ("a", 1, "a"),
        ("a", 1, "b"),
    ]


def test_to_device_skips_keys_and_moves_objects() -> None:
    batch = {
        "x": torch.ones(2),
        "meta": torch.ones(2),
        "enc": Encoding(ids=torch.ones(2)),
    }
    moved = trees.to_device(batch, "meta", skip_keys=("meta",))
    assert moved["x"].is_meta
    assert not moved["meta"].is_meta
    assert moved["enc"]["ids"].is_meta


def test_rows() -> None:
    tree = {
        "x": torch.arange(6).reshape(3, 2),
        "y": torch.tensor(1.0),
        "z": torch.arange(5),
    }
    assert trees.batch_size(tree) == 3
    cut = trees.slice_rows(tree, slice(0, 2), size=3)
    assert cut["x"].shape == (2, 2)
    assert cut["z"].shape == (5,)
    joined = trees.concat([tree, tree])
    assert joined["x"].shape == (6, 2)
    assert joined["y"].tolist() == [1.0, 1.0]


def test_half_outputs_become_float() -> None:
    out = trees.to_fp32(
        Output(
            a=torch.ones(1, dtype=torch.bfloat16), b=torch.ones(1, dtype=torch.int32)
        )
    )
    assert out["a"].dtype == torch.float32
    assert out["b"].dtype == torch.int32
