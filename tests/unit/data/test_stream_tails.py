"""The end of a stream is cut as the end of map-style data is: one big batch, spread over the ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, ChainDataset, DataLoader, SequentialSampler

from hasten.errors import ConfigError
from tests.support.loaders import (
    CountingStream,
    SeenBatches,
    global_order,
    prepared,
    seen,
)


class SizedStream(CountingStream):
    def __len__(self) -> int:
        return self.size


def shares_of_ranks(
    data: Any,
    batch: int,
    world: int,
    drop_last: bool,
    workers: int = 0,
    **settings: Any,
) -> list[list[SeenBatches]]:
    options: dict[str, Any] = (
        {"multiprocessing_context": "fork", "num_workers": workers} if workers else {}
    )
    loaders = [
        prepared(
            DataLoader(data, batch_size=batch, drop_last=drop_last, **options),
            rank,
            world,
            **settings,
        )
        for rank in range(world)
    ]
    shares_by_rank = [seen(loader) for loader in loaders]
    for loader, share in zip(loaders, shares_by_rank, strict=True):
        if isinstance(data, SizedStream) and not workers:
            assert len(loader) == len(share)
    return shares_by_rank


def test_fifty_samples_in_batches_of_three_on_two_ranks() -> None:
    for data in (range(50), CountingStream(50), SizedStream(50)):
        last = [share[-1] for share in shares_of_ranks(data, 3, 2, False)]
        assert last == [SeenBatches([48], 1, True), SeenBatches([49], 1, True)]


@pytest.mark.parametrize(
    "world",
    [2, 3, *(pytest.param(world, marks=pytest.mark.exhaustive) for world in (1, 4, 5))],
)
def test_streams_end_as_map_style_data_does(world: int) -> None:
    choices = (False, True)
    for size, batch, drop_last, even, split in itertools.product(
        (0, 1, 2, 5, 13), (1, 3), choices, choices, choices
    ):
        rows = batch * world if split else batch
        for pad in ("least", "full"):
            settings: dict[str, Any] = {
                "even_batches": even,
                "split_batches": split,
                "pad": pad,
            }
            expected_shares = shares_of_ranks(
                range(size), rows, world, drop_last, **settings
            )
            for stream in (CountingStream(size), SizedStream(size)):
                stream_shares = shares_of_ranks(
                    stream, rows, world, drop_last, **settings
                )
                assert stream_shares == expected_shares, (
                    type(stream),
                    size,
                    batch,
                    drop_last,
                    settings,
                )
            if even and pad == "least" and not drop_last:
                read = Counter(
                    value
                    for share in stream_shares
                    for row in share
                    for value in row.values
                )
                assert sum(read.values()) - size <= world - 1, (
                    "processes - 1 repeats at most"
                )


def test_unequal_shares_of_a_global_batch_are_read_once() -> None:
    """A round is the global batch on every rank, also where ranks have different rows of it."""
    for size in (0, 3, 7, 20, 23):
        expected_shares = shares_of_ranks(
            range(size), 7, 3, False, split_batches=True, even_batches=False
        )
        assert (
            shares_of_ranks(
                CountingStream(size),
                7,
                3,
                False,
                split_batches=True,
                even_batches=False,
            )
            == expected_shares
        )


@pytest.mark.parametrize("size", [9, 14])
def test_each_worker_of_a_stream_has_an_end_of_its_own(size: int) -> None:
    """As in plain torch, where every worker gives a short batch."""
    rank_shares = shares_of_ranks(CountingStream(size), 3, 2, False, workers=2)
    assert sorted(global_order(rank_shares)) == list(range(size))
    for step in zip(*rank_shares, strict=True):
        assert len({len(row.values) for row in step}) == 1
    repeats = sum(len(row.values) for share in rank_shares for row in share) - size
    assert repeats <= 2, "one for each worker"


def test_a_position_before_the_padding_samples_pads_as_before() -> None:
    """The first step of a larger world may begin before all samples that its padding needs were read."""
    first = prepared(DataLoader(CountingStream(6), batch_size=1), 0, 1)
    assert seen(first, 1)[0].values == [0]
    state = first.state_dict()
    resumed_shares = []
    for rank in range(4):
        loader = prepared(DataLoader(CountingStream(6), batch_size=1), rank, 4)
        loader.load_state_dict(state)
        resumed_shares.append(seen(loader))
    assert global_order(resumed_shares) == [1, 2, 3, 4, 5]
    assert [share[-1].values for share in resumed_shares] == [[5], [0], [1], [2]]


def test_chained_streams_without_a_length_are_prepared() -> None:
    def chained_loader() -> DataLoader[Any]:
        return DataLoader(
            ChainDataset([CountingStream(5), CountingStream(8)]), batch_size=2
        )

    rank_shares = [seen(prepared(chained_loader(), rank, 3)) for rank in range(3)]
    assert global_order(rank_shares) == [*range(5), *range(8)]
    loader = prepared(chained_loader(), 0, 1)
    with pytest.raises(TypeError, match="no length"):
        len(loader)
    seen(loader, 2)
    state = loader.state_dict()
    resumed_loader = prepared(chained_loader(), 0, 1)
    resumed_loader.load_state_dict(state)
    assert [row.values for row in seen(resumed_loader)] == [
        [4, 0],
        [1, 2],
        [3, 4],
        [5, 6],
        [7],
    ]
    sized = prepared(
        DataLoader(ChainDataset([SizedStream(5), SizedStream(8)]), batch_size=2), 0, 1
    )
    assert len(sized) == 7


class OwnBatches(BatchSampler):
    """Batches of two, without saying so."""

    def __init__(self, size: int) -> None:
        super().__init__(SequentialSampler(range(size)), 2, False)
        del self.batch_size


@pytest.mark.parametrize("dispatch", [False, True])
def test_full_padding_is_refused_where_the_rows_of_a_full_batch_are_unknown(
    dispatch: bool,
) -> None:
    data: Any = range(5)
    for loader in (
        DataLoader(data, batch_sampler=OwnBatches(5)),
        DataLoader(data, batch_size=None),
        DataLoader(CountingStream(5), batch_size=None),
    ):
        with pytest.raises(ConfigError, match=r'pad="full" with .* set pad="least"'):
            prepared(loader, pad="full", dispatch_batches=dispatch)
    loader_of_twos = prepared(
        DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 2, False)),
        pad="full",
    )
    assert [len(batch) for batch in loader_of_twos] == [2, 2, 2]
    assert isinstance(next(iter(loader_of_twos)), torch.Tensor)
