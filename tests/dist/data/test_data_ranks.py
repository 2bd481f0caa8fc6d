"""Loaders on real ranks: laws hold, lengths are agreed, samplers are shared, errors reach everybody."""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from hasten.data.loader import Loader
from hasten.errors import DataError, PeerFailedError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from tests.support.loaders import (
    CountingStream,
    SeenBatches,
    global_order,
    on_every_rank,
    prepared,
    seen,
)


def shares_of(
    ctx: ProcessContext, loader: Loader, limit: int | None = None
) -> list[list[SeenBatches]]:
    """What every rank sees in one pass."""
    return on_every_rank(ctx, seen(loader, limit))


@ranks(2, 4)
def test_laws_hold_on_real_ranks(ctx: ProcessContext) -> None:
    world = ctx.world.size
    for size, batch in ((0, 1), (1, 4), (5, 1), (17, 3), (26, 4)):
        for drop_last, even, split in itertools.product((False, True), repeat=3):
            if split and batch % world:
                continue
            user: DataLoader[Any] = DataLoader(
                range(size),  # type: ignore[arg-type]
                batch_size=batch,
                shuffle=size > 0,
                drop_last=drop_last,
            )
            loader = prepared(user, ctx=ctx, even_batches=even, split_batches=split)
            shares = shares_of(ctx, loader)
            order = global_order(shares)
            step = batch if split else batch * world
            assert (
                len(order)
                == len(set(order))
                == (size - size % step if drop_last else size)
            )
            if even:
                assert len({len(share) for share in shares}) == 1
                assert len(shares[0]) == len(loader)


class Jumbled(Sampler[int]):
    """Every process draws another order, whatever it is seeded with."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.size))
        random.Random(os.urandom(8)).shuffle(order)
        return iter(order)


@ranks(2, 4)
def test_a_sampler_no_seed_can_tame_is_drawn_once_for_all(ctx: ProcessContext) -> None:
    for size in (23, 3000):
        user: DataLoader[Any] = DataLoader(
            range(size),  # type: ignore[arg-type]
            batch_size=4,
            sampler=Jumbled(size),
        )
        shares = shares_of(ctx, prepared(user, ctx=ctx))
        assert sorted(global_order(shares)) == list(range(size))


class Faulty(Sampler[int]):
    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        yield from range(3)
        raise KeyError("no more")


@ranks(2)
def test_a_sampler_that_raises_ends_every_rank(ctx: ProcessContext) -> None:
    loader = prepared(DataLoader(range(8), batch_size=2, sampler=Faulty()), ctx=ctx)  # type: ignore[arg-type]
    expected: Any = KeyError if ctx.rank == 0 else PeerFailedError
    with pytest.raises(expected, match="no more"):
        seen(loader)


@ranks(2, 4)
def test_ranks_that_disagree_on_length_are_named_and_do_not_hang(
    ctx: ProcessContext,
) -> None:
    with pytest.raises(
        DataError, match=r"the dataset's length \(rank 0: 10, rank 1: 11"
    ) as caught:
        prepared(DataLoader(range(10 + ctx.rank), batch_size=2), ctx=ctx)  # type: ignore[arg-type]
    assert "Give every rank the whole dataset" in str(caught.value)
    with pytest.raises(DataError, match="differ in batch_size"):
        prepared(DataLoader(range(10), batch_size=2 + ctx.rank), ctx=ctx)  # type: ignore[arg-type]


@ranks(2, 4)
def test_the_first_ranks_seed_is_everybodys(ctx: ProcessContext) -> None:
    loader = prepared(
        DataLoader(range(20), batch_size=2, shuffle=True),  # type: ignore[arg-type]
        ctx=ctx,
        seed=1000 + ctx.rank,
    )
    assert sorted(global_order(shares_of(ctx, loader))) == list(range(20))
    assert loader.state_dict()["seed"] == 1000


class Own(IterableDataset[int]):
    """A stream that knows its own part, of a length of its own, through `shard`."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def shard(self, num_shards: int, index: int) -> Iterator[int]:
        return iter(range(100 * index, 100 * index + self.lengths[index]))

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("a stream that can be asked for parts is never read whole")


@ranks(3)
def test_streams_of_unequal_parts_agree_on_the_number_of_steps(
    ctx: ProcessContext,
) -> None:
    lengths = [5, 2, 9]
    every = sorted(
        100 * rank + value for rank in range(3) for value in range(lengths[rank])
    )

    loader = prepared(DataLoader(Own(lengths), batch_size=2), ctx=ctx)
    shares = shares_of(ctx, loader)
    assert [len(share) for share in shares] == [5, 5, 5]
    assert sorted(global_order(shares)) == every
    assert [row.last for row in shares[1]] == [False] * 4 + [True]
    assert [row.real for row in shares[1]] == [2, 0, 0, 0, 0]
    assert all(len(row.values) == 2 for share in shares for row in share)

    loader = prepared(DataLoader(Own(lengths), batch_size=2, drop_last=True), ctx=ctx)
    shares = shares_of(ctx, loader)
    assert [len(share) for share in shares] == [1, 1, 1]

    loader = prepared(
        DataLoader(Own(lengths), batch_size=2), ctx=ctx, even_batches=False
    )
    shares = shares_of(ctx, loader)
    assert [len(share) for share in shares] == [3, 1, 5]
    assert sorted(global_order(shares)) == every


@ranks(2)
def test_a_rank_without_any_sample_is_named(ctx: ProcessContext) -> None:
    loader = prepared(DataLoader(Own([4, 0]), batch_size=2), ctx=ctx)
    with pytest.raises(DataError, match=r"no sample for rank\(s\) 1 of 2"):
        seen(loader)
    assert shares_of(ctx, prepared(DataLoader(Own([0, 0]), batch_size=2), ctx=ctx)) == [
        [],
        [],
    ]


@ranks(2, 4)
def test_streams_end_together_and_resume_on_real_ranks(ctx: ProcessContext) -> None:
    def make() -> Loader:
        return prepared(DataLoader(CountingStream(29), batch_size=2), ctx=ctx)

    uninterrupted = shares_of(ctx, make())
    assert sorted(global_order(uninterrupted)) == list(range(29))
    assert len({len(share) for share in uninterrupted}) == 1
    for stop in range(1, len(uninterrupted[0])):
        loader = make()
        seen(loader, limit=stop)
        state = json.loads(json.dumps(loader.state_dict()))
        assert ctx.world.all_gather_object(state) == [state] * ctx.world.size
        resumed_loader = make()
        resumed_loader.load_state_dict(state)
        assert shares_of(ctx, resumed_loader) == [
            share[stop:] for share in uninterrupted
        ]


@ranks(2)
def test_resume_after_every_batch_with_workers_on_real_ranks(
    ctx: ProcessContext,
) -> None:
    def make(num_workers: int) -> Loader:
        user: DataLoader[Any] = DataLoader(
            range(13),  # type: ignore[arg-type]
            batch_size=2,
            shuffle=True,
            num_workers=num_workers,
        )
        return prepared(user, ctx=ctx)

    uninterrupted = shares_of(ctx, make(0))
    for stop in range(1, len(uninterrupted[0]) + 1):
        loader = make(2)
        seen(loader, limit=stop)
        resumed_loader = make(2)
        resumed_loader.load_state_dict(loader.state_dict())
        assert shares_of(ctx, resumed_loader) == [
            share[stop:] for share in uninterrupted
        ]


@ranks(4, mesh={"dp_replicate": 2, "tp": 2})
def test_peers_along_tensor_parallel_read_the_same(ctx: ProcessContext) -> None:
    user: DataLoader[Any] = DataLoader(range(14), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    shares = shares_of(ctx, prepared(user, ctx=ctx))
    assert shares[0] == shares[1]
    assert shares[2] == shares[3]
    assert sorted(global_order(shares[::2])) == list(range(14))
    streamed = shares_of(
        ctx, prepared(DataLoader(CountingStream(14), batch_size=2), ctx=ctx)
    )
    assert streamed[0] == streamed[1]
    assert sorted(global_order(streamed[::2])) == list(range(14))


class Deadly(Dataset[int]):
    """Takes the process that reads it with it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        time.sleep(0.2)  # until the reading process waits
        os._exit(3)


@ranks(2)
def test_a_worker_that_dies_is_reported_with_rank_and_indices(
    ctx: ProcessContext,
) -> None:
    loader = prepared(DataLoader(Deadly(), batch_size=2, num_workers=1), ctx=ctx)
    with pytest.raises(RuntimeError, match="exited unexpectedly") as caught:
        seen(loader)
    notes = " ".join(caught.value.__notes__)
    assert f"rank {ctx.rank}, epoch 0, batch 0" in notes
    assert f"indices of that batch: [{2 * ctx.rank}, {2 * ctx.rank + 1}]" in notes
