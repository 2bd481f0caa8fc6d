"""Dispatching: one rank reads, each rank receives its own part and nothing else, of any shape."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hasten.comm.base import Comm
from hasten.data.dispatch import _scatter_messages
from hasten.data.loader import Loader
from hasten.errors import CommError, PeerFailedError
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


class Opaque:
    """A batch object of the user's own that nothing can look into."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def shares_of(
    ctx: ProcessContext, loader: Loader, limit: int | None = None
) -> list[list[SeenBatches]]:
    return on_every_rank(ctx, seen(loader, limit))


@ranks(2, 3)
def test_any_tree_of_any_size_is_scattered(ctx: ProcessContext) -> None:
    codec = ctx.world.codec
    for size in (3, 10, 100_000, 5):
        rank_trees: list[dict[str, Any]] = [
            {
                "a": torch.arange(size + rank, dtype=torch.float16),
                "b": [
                    (torch.eye(rank + 1, dtype=torch.bool), [f"row {rank}"]),
                    7,
                    None,
                ],
                "c": torch.tensor(float(rank)),
                "empty": torch.empty(0, 3),
                "complex": torch.complex(torch.ones(2), torch.full((2,), float(rank))),
                "view": torch.arange(12.0).reshape(3, 4).T,
            }
            for rank in range(ctx.world.size)
        ]
        messages = list(map(codec.encode, rank_trees)) if ctx.rank == 0 else None
        scattered = codec.decode(_scatter_messages(ctx.world, messages))
        rank_tree = rank_trees[ctx.rank]
        for key in ("a", "c", "empty", "complex", "view"):
            assert torch.equal(scattered[key], rank_tree[key])
            assert scattered[key].dtype == rank_tree[key].dtype
        assert torch.equal(scattered["b"][0][0], rank_tree["b"][0][0])
        assert scattered["b"][0][1] == [f"row {ctx.rank}"]
        assert scattered["b"][1:] == [7, None]


@ranks(2)
def test_a_batch_that_is_not_plain_is_an_error_on_every_rank(
    ctx: ProcessContext,
) -> None:
    def collate(rows: list[int]) -> Opaque:
        return Opaque(torch.tensor(rows))

    loader = prepared(
        DataLoader(list(range(8)), batch_size=2, collate_fn=collate),  # type: ignore[arg-type]
        ctx=ctx,
        dispatch_batches=True,
    )
    expected: type[Exception] = PeerFailedError if ctx.rank else CommError
    with pytest.raises(expected, match="Opaque"):
        list(loader)


@ranks(2, exhaustive=(4,))
def test_dispatched_map_data_is_read_as_sharded_data_is(ctx: ProcessContext) -> None:
    for size, batch, shuffle in (
        (0, 1, False),
        (1, 4, True),
        (7, 1, True),
        (26, 4, False),
    ):
        for drop_last, even, split in itertools.product((False, True), repeat=3):
            if split and batch % ctx.world.size:
                continue

            def build(
                size: int = size,
                batch: int = batch,
                shuffle: bool = shuffle,
                drop: bool = drop_last,
            ) -> Any:
                return DataLoader(
                    range(size),  # type: ignore[arg-type]
                    batch_size=batch,
                    shuffle=shuffle and size > 0,
                    drop_last=drop,
                )

            settings: dict[str, Any] = {"even_batches": even, "split_batches": split}
            expected = seen(prepared(build(), ctx=ctx, **settings))
            loader = prepared(build(), ctx=ctx, dispatch_batches=True, **settings)
            assert seen(loader) == expected
            assert len(loader) == len(expected)


class ReadOnFirst(Dataset[int]):
    """Data that only the first rank can reach."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        if self.rank:
            raise AssertionError("read on a rank that only receives")
        if index == 8:
            raise OSError("unreadable")
        return index


@ranks(2)
def test_only_the_first_rank_reads_and_its_error_reaches_everybody(
    ctx: ProcessContext,
) -> None:
    loader = prepared(
        DataLoader(ReadOnFirst(ctx.rank), batch_size=2), ctx=ctx, dispatch_batches=True
    )
    rows: list[list[int]] = []
    expected: Any = OSError if ctx.rank == 0 else PeerFailedError
    with pytest.raises(expected, match="unreadable"):
        rows.extend(batch.tolist() for batch in loader)
    assert rows == ([[0, 1], [4, 5]] if ctx.rank == 0 else [[2, 3], [6, 7]])


class Ragged(IterableDataset[Tensor]):
    """Rows of varying length."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.full((1 + value % 3,), value) for value in range(11)])


def pad(samples: list[Tensor]) -> dict[str, Tensor]:
    return {
        "x": torch.nn.utils.rnn.pad_sequence(
            samples, batch_first=True, padding_value=-1
        )
    }


@ranks(2, 3)
def test_streams_of_varying_shapes_are_dispatched(ctx: ProcessContext) -> None:
    for split in (False, True):
        user = DataLoader(Ragged(), batch_size=6 if split else 2, collate_fn=pad)
        loader = prepared(user, ctx=ctx, dispatch_batches=True, split_batches=split)
        rank_rows = []
        for batch in loader:
            rows = batch["x"][: loader.cursor.num_real]
            rank_rows += [int(row[0]) for row in rows]
        everyone = ctx.world.all_gather_object(
            (rank_rows, loader.cursor.batch, loader.cursor.at_end)
        )
        assert sorted(
            value for read_rows, _, _ in everyone for value in read_rows
        ) == list(range(11))
        assert len({steps for _, steps, _ in everyone}) == 1
        assert all(at_end for _, _, at_end in everyone)


@ranks(2, exhaustive=(4,))
def test_dispatched_streams_follow_the_laws_and_resume(ctx: ProcessContext) -> None:
    for size, drop_last, even in itertools.product(
        (0, 1, 9, 16), (False, True), (False, True)
    ):

        def make(size: int = size, drop: bool = drop_last, even: bool = even) -> Loader:
            user = DataLoader(CountingStream(size), batch_size=2, drop_last=drop)
            return prepared(user, ctx=ctx, dispatch_batches=True, even_batches=even)

        shares = shares_of(ctx, make())
        order = global_order(shares)
        step = 2 * ctx.world.size
        assert order == list(range(size - size % step if drop_last else size))
        if even:
            assert len({len(share) for share in shares}) == 1
        for share in shares:
            assert [row.last for row in share] == [False] * (len(share) - 1) + [
                True
            ] * bool(share)
    uninterrupted = shares_of(
        ctx,
        prepared(
            DataLoader(CountingStream(23), batch_size=2), ctx=ctx, dispatch_batches=True
        ),
    )
    for stop in range(1, len(uninterrupted[0]) + 1):
        loader = prepared(
            DataLoader(CountingStream(23), batch_size=2), ctx=ctx, dispatch_batches=True
        )
        seen(loader, stop)
        state = json.loads(json.dumps(loader.state_dict()))
        resumed_loader = prepared(
            DataLoader(CountingStream(23), batch_size=2), ctx=ctx, dispatch_batches=True
        )
        resumed_loader.load_state_dict(state)
        assert shares_of(ctx, resumed_loader) == [
            share[stop:] for share in uninterrupted
        ]


@ranks(2)
def test_dispatched_map_data_resumes_with_workers(ctx: ProcessContext) -> None:
    def make(num_workers: int) -> Loader:
        user: DataLoader[Any] = DataLoader(
            range(15),  # type: ignore[arg-type]
            batch_size=2,
            shuffle=True,
            num_workers=num_workers,
        )
        return prepared(user, ctx=ctx, dispatch_batches=True)

    uninterrupted = shares_of(ctx, make(0))
    for stop in (1, 3):
        loader = make(2)
        seen(loader, stop)
        resumed_loader = make(2)
        resumed_loader.load_state_dict(loader.state_dict())
        assert shares_of(ctx, resumed_loader) == [
            share[stop:] for share in uninterrupted
        ]
    first = make(0)
    # and a break leaves nothing on the wire
    assert shares_of(ctx, first, limit=2) == [share[:2] for share in uninterrupted]
    assert sorted(global_order(shares_of(ctx, first))) == list(range(15))


@ranks(4, mesh={"dp_replicate": 2, "tp": 2})
def test_tensor_parallel_peers_receive_the_same_part(ctx: ProcessContext) -> None:
    loader = prepared(
        DataLoader(range(14), batch_size=2),  # type: ignore[arg-type]
        ctx=ctx,
        dispatch_batches=True,
    )
    shares = shares_of(ctx, loader)
    assert shares[0] == shares[1]
    assert shares[2] == shares[3]
    assert global_order(shares[::2]) == list(range(14))


class Counting:
    """A communicator that counts what it scatters."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.scattered: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def scatter(self, tensors: Any, like: Tensor, src: int = 0) -> Tensor:
        self.scattered.append(like.numel())
        return self._comm.scatter(tensors, like, src)


@ranks(2, 4)
def test_a_step_scatters_one_ranks_part_only(ctx: ProcessContext) -> None:
    counting: Any = Counting(ctx.world)
    rows = torch.zeros(64, 16_384)
    counting_context = ProcessContext(
        ctx.topology, ctx.mesh, ctx.device, counting, ctx.groups
    )
    dataset: Any = rows
    loader = prepared(
        DataLoader(dataset, batch_size=4), ctx=counting_context, dispatch_batches=True
    )
    steps = len([None for _ in loader])
    # the sizes of its messages go before those of a step
    assert len(counting.scattered) == 2 * steps
    assert counting.scattered[::2] == [2] * steps
    part_bytes = 4 * 16_384 * 4
    assert all(
        part_bytes < size < part_bytes + 16_384 for size in counting.scattered[1::2]
    )
