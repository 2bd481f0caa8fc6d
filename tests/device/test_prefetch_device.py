"""Prefetching to an accelerator: right values whatever streams do, nothing freed too early, copies beside compute."""

from __future__ import annotations

import gc
import threading
import time
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hasten.config.sections.loop import DataLoaderConfiguration
from hasten.data.build import prepare_loader
from hasten.data.loader import Loader
from hasten.optim.clock import StepClock
from tests.support.loaders import context_of

pytestmark = pytest.mark.device

ROWS, WIDTH = 64, 4096


class NumberedRows(Dataset[Tensor]):
    """Row i holds the number i everywhere."""

    def __init__(self, size: int = ROWS, width: int = WIDTH) -> None:
        self.size, self.width = size, width

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((self.width,), float(index))


class Pair(NamedTuple):
    x: Tensor
    names: list[str]


@dataclass
class BatchWithNote:
    x: Tensor
    note: str


class CustomBatch:
    """A batch object of the user's own: it can be moved and pinned, and says nothing about streams."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: Any, non_blocking: bool = False) -> CustomBatch:
        return CustomBatch(self.x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> CustomBatch:
        return CustomBatch(self.x.pin_memory())


def on_device(loader: DataLoader[Any], **settings: Any) -> Loader:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    device = torch.device(device.type, 0)
    config = DataLoaderConfiguration(**settings)
    return prepare_loader(
        loader,
        ctx=context_of(),
        config=config,
        clock=StepClock(),
        device=device,
        seed=0,
    )


def first_column(x: Tensor) -> list[float]:
    assert torch.equal(x, x[:, :1].expand_as(x))
    return x[:, 0].tolist()


@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 5, None])
def test_every_batch_arrives_as_it_was(
    prefetch: int | None, num_workers: int, pin_memory: bool
) -> None:
    user = DataLoader(
        NumberedRows(), batch_size=8, num_workers=num_workers, pin_memory=pin_memory
    )
    loader = on_device(user, prefetch=prefetch)
    got: list[float] = []
    for number, batch in enumerate(loader, 1):
        assert batch.device.type == torch.accelerator.current_accelerator().type  # type: ignore[union-attr]
        assert loader.state_dict()["consumed"] == 8 * number
        assert loader.cursor.at_end is (number == 8)
        got += first_column(batch)
    assert got == [float(row) for row in range(ROWS)]


def slow_work(x: Tensor, rounds: int = 30) -> Tensor:
    """Keep the stream busy for a while, then read the batch: what was overwritten meanwhile shows."""
    busy = torch.ones(2048, 2048, device=x.device)
    for _ in range(rounds):
        busy = busy @ busy * 1e-4
    return x.sum() + busy.sum() * 0


@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize("prefetch", [1, 3])
def test_freed_batches_are_not_overwritten_while_they_are_read(
    prefetch: int, custom: bool
) -> None:
    """The pattern of a sanitizer: drop each batch at once while the device still reads it, so that its memory is the
    first to be reused, and let later copies rush into it."""

    def collate(samples: list[Tensor]) -> Any:
        x = torch.stack(samples)
        return CustomBatch(x) if custom else x

    # 2 MiB a batch
    user = DataLoader(NumberedRows(512, 65_536), batch_size=8, collate_fn=collate)
    loader = on_device(user, prefetch=prefetch)
    sums = []
    for batch in loader:
        x = batch.x if custom else batch
        sums.append(slow_work(x))
        del batch, x
        # takes freed memory of this stream, if there is any
        junk = torch.full((8, 65_536), -1.0, device="cuda")
        del junk
    expected = [sum(range(first, first + 8)) * 65_536.0 for first in range(0, 512, 8)]
    assert torch.stack(sums).tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("prefetch", [1, 2, 4])
def test_small_and_large_batches_keep_their_order_and_values(
    prefetch: int, pin_memory: bool
) -> None:
    """Batches of every size in turn: in line, staged in line, staged in a thread; buffers are used again and again."""
    widths = [16, 300_000, 16, 40_000, 5, 40_000, 300_000, 300_000, 1, 20_000] * 8

    class MixedWidths(Dataset[Any]):
        def __len__(self) -> int:
            return len(widths)

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {
                "x": torch.full((widths[index],), float(index)),
                "n": torch.tensor([index]),
            }

    loader = on_device(
        DataLoader(MixedWidths(), batch_size=None, pin_memory=pin_memory),
        prefetch=prefetch,
    )
    sums = []
    for batch in loader:
        sums.append(torch.stack([slow_work(batch["x"], 3), batch["n"].sum().float()]))
        del batch
    expected = [
        [width * float(index), float(index)] for index, width in enumerate(widths)
    ]
    for row, expected_row in zip(torch.stack(sums).tolist(), expected, strict=True):
        assert row == pytest.approx(expected_row, rel=1e-5)


def test_batches_kept_by_the_user_stay_what_they_were() -> None:
    loader = on_device(DataLoader(NumberedRows(128), batch_size=8), prefetch=2)
    batches = list(loader)
    gc.collect()
    assert [value for batch in batches for value in first_column(batch)] == [
        float(row) for row in range(128)
    ]


def test_batches_are_right_on_a_stream_of_the_users() -> None:
    loader = on_device(DataLoader(NumberedRows(128), batch_size=8), prefetch=2)
    side = torch.Stream(device="cuda")
    sums = []
    with side:
        for batch in loader:
            sums.append(slow_work(batch))
            del batch
    side.synchronize()
    expected = [
        sum(range(first, first + 8)) * float(WIDTH) for first in range(0, 128, 8)
    ]
    assert [float(value) for value in sums] == pytest.approx(expected, rel=1e-5)


def test_nested_batches_custom_objects_and_keys_that_stay() -> None:
    def collate(samples: list[Tensor]) -> dict[str, Any]:
        x = torch.stack(samples)
        return {
            "x": x,
            "pair": Pair(x + 1, ["a"]),
            "held": BatchWithNote(x + 2, "note"),
            "user": UserDict({"x": x + 3}),
            "custom": CustomBatch(x + 4),
            "list": [x + 5, 7, None],
            "stays": x + 6,
            "empty": torch.empty(0),
        }

    user = DataLoader(NumberedRows(16), batch_size=8, collate_fn=collate)
    for batch in on_device(user, prefetch=1, prefetch_skip_keys=("stays",)):
        assert batch["x"].is_cuda
        assert torch.equal(batch["pair"].x, batch["x"] + 1)
        assert torch.equal(batch["held"].x, batch["x"] + 2)
        assert torch.equal(batch["user"]["x"], batch["x"] + 3)
        assert torch.equal(batch["custom"].x, batch["x"] + 4)
        assert torch.equal(batch["list"][0], batch["x"] + 5)
        assert batch["list"][1:] == [7, None]
        assert batch["stays"].device.type == "cpu"
        assert batch["empty"].is_cuda


def test_the_staging_thread_ends_with_the_loop() -> None:
    # 2 MiB, unpinned: staged in a thread
    user = DataLoader(NumberedRows(64, 65_536), batch_size=8)
    loader = on_device(user, prefetch=2)
    initial_threads = threading.active_count()
    for _ in loader:
        assert threading.active_count() == initial_threads + 1
        break
    assert threading.active_count() == initial_threads

    class Failing(NumberedRows):
        def __getitem__(self, index: int) -> Tensor:
            if index == 30:
                raise OSError("unreadable")
            return super().__getitem__(index)

    def read_failing_batches() -> Iterator[Any]:
        yield from on_device(DataLoader(Failing(64, 65_536), batch_size=8), prefetch=2)

    with pytest.raises(OSError, match="unreadable"):
        list(read_failing_batches())
    assert threading.active_count() == initial_threads


def test_copies_run_beside_compute() -> None:
    batch = {"x": torch.randn(256, 256, 384).pin_memory()}  # 100 MB

    class RepeatedBatch(Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return 30

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return batch

    weight = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def ms_per_batch(prefetch: int, rounds: int) -> float:
        loader = on_device(
            DataLoader(RepeatedBatch(), batch_size=None),
            prefetch=prefetch,
            non_blocking=True,
        )
        times = []
        for _ in range(3):
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            for moved in loader:
                for _ in range(rounds):
                    weight @ weight
                del moved
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start_s) / 30 * 1e3)
        return min(times)

    copy_ms, both_ms, beside_ms = (
        ms_per_batch(0, 0),
        ms_per_batch(0, 2),
        ms_per_batch(2, 2),
    )
    compute_ms = both_ms - copy_ms
    assert beside_ms < 1.25 * max(copy_ms, compute_ms)
    assert beside_ms < 0.85 * both_ms
