"""What can be known about prefetching without an accelerator: what is pinned, what needs guarding, what is moved."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hasten import trees
from hasten.config.data import DataLoaderConfiguration
from hasten.data import build, prefetch
from hasten.data.loader import plain_move
from hasten.data.plan import Padding
from hasten.data.prefetch import LookAhead, Prefetch
from hasten.data.source import Item
from hasten.testing.loaders import prepared


class Movable:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: Any, non_blocking: bool = False) -> Movable:
        return Movable(self.x.to(device))


class Recorded(Movable):
    def record_stream(self, stream: Any) -> None:
        return


def test_only_objects_that_hide_their_tensors_are_guarded() -> None:
    x = torch.ones(3)
    assert not prefetch._opaque({"x": x, "n": 3, "names": ["a"], "deep": [(x, None)]})
    assert prefetch._opaque([x, {"object": Movable(x)}])
    assert not prefetch._opaque(Recorded(x))


def test_unpinned_bytes_are_those_of_host_tensors() -> None:
    batch = {"x": torch.ones(4, 4), "y": [torch.ones(2, dtype=torch.int64)], "n": 1}
    assert prefetch._unpinned_bytes(batch) == 64 + 16
    assert prefetch._unpinned_bytes({"meta": torch.ones(4, device="meta")}) == 0


def test_the_move_is_chosen_by_device_and_setting() -> None:
    def chosen(device: str | None, **settings: Any) -> Any:
        return build._move(None if device is None else torch.device(device), DataLoaderConfiguration(**settings))

    assert chosen(None) is None
    assert chosen("cpu") is None
    assert isinstance(chosen("cpu", prefetch=3), LookAhead)
    assert isinstance(chosen("cuda:0"), Prefetch)
    assert chosen("cuda:0")._depth == 2
    assert chosen("cuda:0", prefetch=5)._depth == 5
    assert chosen("cuda:0", prefetch=0).__qualname__ == plain_move(lambda batch: batch).__qualname__
    assert chosen("mps").__qualname__ == plain_move(lambda batch: batch).__qualname__


def test_plain_moves_keep_what_the_cursor_says() -> None:
    move = plain_move(lambda batch: batch + 1)
    padded = Padding(1, 2)
    items: list[Item] = [(1, None, False, "a"), (2, padded, True, "b")]
    assert list(move(iter(items))) == [(2, None, False, "a"), (3, padded, True, "b")]


def test_reading_ahead_reads_as_far_as_it_says() -> None:
    read: list[int] = []

    def collate(samples: list[int]) -> list[int]:
        read.extend(samples)
        return samples

    loader = prepared(DataLoader(range(10), batch_size=1, collate_fn=collate), prefetch=3)  # type: ignore[arg-type]
    iterator = iter(loader)
    assert next(iterator) == [0]
    assert read == [0, 1, 2, 3]
    assert [value for batch in iterator for value in batch] == list(range(1, 10))


def test_a_mapping_without_a_to_of_its_own_is_moved_all_the_same() -> None:
    moved = trees.to_device(UserDict({"x": torch.ones(2), "n": 3}), "meta")
    assert moved["x"].device.type == "meta"
    assert moved["n"] == 3
