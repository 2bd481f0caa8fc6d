"""Policies of prepared loaders: pad="full" gives whole batches, order="torch" the order of a plain DataLoader."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SubsetRandomSampler,
)

from hasten.data.batch_plan import plan_rows
from hasten.data.skipping import skip_first_batches
from tests.support.loaders import CountingStream, global_order, prepared, seen


class BucketBatches:
    """A batch sampler of one's own, with a batch size and a short last batch."""

    def __init__(self, size: int, batch_size: int) -> None:
        self.size, self.batch_size = size, batch_size

    def __len__(self) -> int:
        return -(-self.size // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(BatchSampler(range(self.size), self.batch_size, False))


def plain_loader(size: int, batch: int) -> DataLoader[Any]:
    return DataLoader(range(size), batch_size=batch)  # type: ignore[arg-type]


def shuffled_loader(size: int, batch: int) -> DataLoader[Any]:
    return DataLoader(range(size), batch_size=batch, shuffle=True)  # type: ignore[arg-type]


def sampled_loader(size: int, batch: int) -> DataLoader[Any]:
    return DataLoader(
        range(size),  # type: ignore[arg-type]
        batch_size=batch,
        sampler=SubsetRandomSampler(range(size)),
    )


def bucketed_loader(size: int, batch: int) -> DataLoader[Any]:
    return DataLoader(range(size), batch_sampler=BucketBatches(size, batch))  # type: ignore[arg-type]


def stream_loader(size: int, batch: int) -> DataLoader[Any]:
    return DataLoader(CountingStream(size), batch_size=batch)


def test_a_full_plan_gives_whole_shares_and_every_unit_once() -> None:
    for size, batch, world, even in itertools.product(
        range(1, 40), range(1, 6), range(1, 6), (True, False)
    ):
        order: list[int] = []
        for shard in range(world):
            plan = plan_rows(
                batch_size=batch,
                num_shards=world,
                shard=shard,
                split=False,
                drop_last=False,
                even=even,
                pad="full",
            )
            *_, last = [
                row for chunk in plan.assign(size) for row in chunk.tolist()
            ] or [[]]
            if even:
                assert plan.steps(size) == -(-size // (batch * world))
                assert len(last) == batch
            tail = plan.tail(size)
            order += [] if tail is None else range(tail.first, tail.first + tail.real)
            assert tail is None or last == [
                position % size
                for position in range(tail.first, tail.first + tail.rows)
            ]
        assert order == list(range(size - size % (batch * world), size))


@pytest.mark.parametrize(
    "build",
    [plain_loader, shuffled_loader, sampled_loader, bucketed_loader, stream_loader],
)
@pytest.mark.parametrize("split", [False, True])
def test_full_padding_gives_every_rank_whole_batches(
    build: Callable[[int, int], DataLoader[Any]], split: bool
) -> None:
    for size, world in itertools.product((1, 2, 5, 12, 17, 24), (1, 2, 4)):
        rows = 4 // world if split else 4
        shares = [
            seen(prepared(build(size, 4), rank, world, pad="full", split_batches=split))
            for rank in range(world)
        ]
        assert {len(batch.values) for share in shares for batch in share} == {rows}
        assert {len(share) for share in shares} == {-(-size // (rows * world))}
        assert sorted(global_order(shares)) == list(range(size))
        assert all(
            batch.last == (number == len(share))
            for share in shares
            for number, batch in enumerate(share, 1)
        )
        padding = [
            row for share in shares for row in share[-1].values[share[-1].real :]
        ]
        if build is not stream_loader:  # ranks of a stream keep its first elements only
            epoch = global_order(shares)
            assert padding == [
                epoch[position % size] for position in range(len(padding))
            ]


@pytest.mark.parametrize("build", [plain_loader, bucketed_loader, stream_loader])
def test_full_padding_when_one_rank_reads_for_all(
    build: Callable[[int, int], DataLoader[Any]],
) -> None:
    for size in (1, 5, 12):
        for split in (False, True):
            loader = prepared(
                build(size, 4), pad="full", dispatch_batches=True, split_batches=split
            )
            share = seen(loader)
            assert [len(batch.values) for batch in share] == [4] * -(-size // 4)
            assert sorted(global_order([share])) == list(range(size))


def test_an_unbatched_stream_is_skipped_by_reading_past() -> None:
    stream = DataLoader(CountingStream(6), batch_size=None)
    assert list(skip_first_batches(stream, 2)) == [2, 3, 4, 5]
