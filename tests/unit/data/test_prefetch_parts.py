"""What can be known about prefetching without an accelerator: sizes, staging buffers, and which way a batch takes."""

from __future__ import annotations

import math
from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hasten import trees
from hasten.config.sections.loop import DataLoaderConfiguration
from hasten.data import build, prefetch
from hasten.data.batch_plan import Padding
from hasten.data.prefetch import InLine, LookAhead, Prefetch, Queue, Slot
from hasten.data.source import Item, move_on_request
from tests.support.loaders import prepared


class MovableBatch:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: Any, non_blocking: bool = False) -> MovableBatch:
        return MovableBatch(self.x.to(device))


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class StreamRecordingBatch(MovableBatch):
    def record_stream(self, stream: Any) -> None:
        return


def test_the_size_of_a_batch_is_that_of_its_tensors() -> None:
    x, y = torch.ones(4, 4), torch.ones(2, dtype=torch.int64)
    for batch in (
        {"x": x, "y": [y], "n": 1},
        [x, (y, None)],
        (x, {"deep": {"y": y}, "name": "a"}),
        UserDict({"x": x, "y": y}),
        Pair(x, y),
    ):
        assert prefetch.count_host_bytes(batch) == 64 + 16
    assert prefetch.count_host_bytes(x) == 64
    assert prefetch.count_host_bytes(torch.nn.Parameter(x)) == 64
    assert prefetch.count_host_bytes({"n": 3, "names": ["a"]}) == 0


def test_objects_that_hide_their_tensors_are_prefetched_if_they_can_be_recorded() -> (
    None
):
    x = torch.ones(3)
    assert prefetch.count_host_bytes([x, {"object": MovableBatch(x)}]) == -math.inf
    assert prefetch.count_host_bytes(StreamRecordingBatch(x)) == math.inf
    assert InLine(torch.device("cpu")).takes(MovableBatch(x))
    assert not InLine(torch.device("cpu")).takes(StreamRecordingBatch(x))


def test_small_batches_are_copied_in_line_until_that_holds_the_host_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = (torch.ones(8), torch.ones(2))
    quick = InLine(torch.device("cpu"))
    assert not quick.takes(torch.ones(1 << 15))
    for _ in range(20):
        assert quick.takes(batch)
        moved = quick.copy(batch)
        assert [tensor.tolist() for tensor in moved] == [
            tensor.tolist() for tensor in batch
        ]
    clock_readings = iter(range(1_000))
    monkeypatch.setattr(
        "hasten.data.prefetch.time.perf_counter", lambda: float(next(clock_readings))
    )  # a second passes at each look
    slow = InLine(torch.device("cpu"))
    num_taken = 0
    while slow.takes(batch) and num_taken < 100:
        slow.copy(batch)
        num_taken += 1
    assert 0 < num_taken < 20


def test_staging_buffers_are_reused_and_hold_what_they_were_given() -> None:
    allocated_sizes: list[int] = []

    def allocate(num_bytes: int) -> Tensor:
        allocated_sizes.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    slot = Slot(torch.Event(device="cpu"), allocate)
    random = torch.Generator().manual_seed(0)
    for turn in range(60):
        slot.take()
        for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.bool):
            shape = torch.randint(1, 9, (turn % 3 + 1,), generator=random).tolist()
            x = torch.randint(2, shape, generator=random).to(dtype)
            staged = slot.staged(x)
            assert staged.shape == x.shape
            assert staged.dtype == x.dtype
            assert torch.equal(staged, x)
            assert staged.data_ptr() != x.data_ptr()
    assert len(allocated_sizes) < 40  # only when a tensor outgrows its buffer
    num_allocated = len(allocated_sizes)
    for _ in range(10):
        slot.take()
        for size in (4, 8, 2, 1):
            slot.staged(torch.ones(size))
    assert len(allocated_sizes) == num_allocated


def test_two_tensors_of_a_batch_never_share_a_buffer() -> None:
    slot = Slot(
        torch.Event(device="cpu"),
        lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8),
    )
    slot.take()
    staged = [slot.staged(torch.full((4,), float(value))) for value in range(5)]
    assert [view.tolist() for view in staged] == [
        [float(value)] * 4 for value in range(5)
    ]


def test_the_move_is_chosen_by_device_and_setting() -> None:
    def move_for(device: str | None, **settings: Any) -> Any:
        return build._choose_move(
            None if device is None else torch.device(device),
            DataLoaderConfiguration(**settings),
        )[0]

    assert move_for(None) is None
    assert move_for("cpu") is None
    assert isinstance(move_for("cpu", prefetch=3), LookAhead)
    assert isinstance(move_for("cuda:0"), Prefetch)
    assert move_for("cuda:0")._depth == 2
    assert move_for("cuda:0", prefetch=5)._depth == 5
    assert (
        move_for("cuda:0", prefetch=0).__qualname__
        == move_on_request(lambda batch: batch).__qualname__
    )
    assert (
        move_for("mps").__qualname__
        == move_on_request(lambda batch: batch).__qualname__
    )


def test_batches_that_workers_read_for_a_gpu_are_pinned() -> None:
    def pins(
        device: str | None, workers: int = 2, user_pins: bool = False, **settings: Any
    ) -> bool:
        loader: DataLoader[Any] = DataLoader(
            range(2),  # type: ignore[arg-type]
            num_workers=workers,
            pin_memory=user_pins,
        )
        target_device = None if device is None else torch.device(device)
        return build._needs_pinning(
            loader, target_device, DataLoaderConfiguration(**settings)
        )

    assert pins("cuda:0")
    assert not pins("cuda:0", workers=0)
    assert pins("cuda:0", workers=0, pin_memory=True)
    assert not pins("cuda:0", pin_memory=False)
    assert not pins("cuda:0", user_pins=True)  # it is on already
    assert not pins("cuda:0", dispatch_batches=True)
    assert not pins("cpu", pin_memory=True)
    assert not pins(None, pin_memory=True)


def test_plain_moves_keep_what_the_cursor_says() -> None:
    move = move_on_request(lambda batch: batch + 1)
    padded = Padding(1, 2)
    items: list[Item] = [(1, None, False, "a"), (2, padded, True, "b")]
    assert list(move(iter(items))) == [(2, None, False, "a"), (3, padded, True, "b")]


def test_reading_ahead_reads_as_far_as_it_says() -> None:
    read: list[int] = []

    def collate(samples: list[int]) -> list[int]:
        read.extend(samples)
        return samples

    loader = prepared(
        DataLoader(range(10), batch_size=1, collate_fn=collate),  # type: ignore[arg-type]
        prefetch=3,
    )
    iterator = iter(loader)
    assert next(iterator) == [0]
    assert read == [0, 1, 2, 3]
    assert [value for batch in iterator for value in batch] == list(range(1, 10))


def test_a_mapping_without_a_to_of_its_own_is_moved_all_the_same() -> None:
    moved = trees.to_device(UserDict({"x": torch.ones(2), "n": 3}), "meta")
    assert moved["x"].device.type == "meta"
    assert moved["n"] == 3


def test_a_queue_gives_batches_in_order_and_opens_no_lane_for_small_ones() -> None:
    cpu = torch.device("cpu")
    with Queue(cpu, 1, InLine(cpu)) as queue:
        for number in range(3):
            queue.append({"x": torch.full((2,), number)})
        assert len(queue) == 3
        assert [int(queue.popleft()["x"][0]) for _ in range(3)] == [0, 1, 2]
        assert queue._copy_stream is None
