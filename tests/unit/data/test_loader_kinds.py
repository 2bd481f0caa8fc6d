"""Every kind of DataLoader a user can bring, read by several ranks: nothing lost, nothing twice."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from hasten.errors import ConfigError, DataError, PrepareError
from tests.support.loaders import (
    CountingStream,
    SeenBatches,
    global_order,
    prepared,
    seen,
)

DATA = list(range(23))
Build = Callable[[], DataLoader[Any]]


def shares_of(
    build: Build, world: int, epochs: int = 1, **settings: Any
) -> list[list[SeenBatches]]:
    """What each rank sees in its last of `epochs` passes; every rank builds its own loader, as processes do."""
    shares = []
    for rank in range(world):
        torch.manual_seed(rank)  # ranks whose random states differ
        random.seed(rank)
        loader = prepared(build(), rank, world, **settings)
        for _ in range(epochs):
            share = seen(loader)
        shares.append(share)
    return shares


def check_even(shares: list[list[SeenBatches]]) -> None:
    assert len({len(share) for share in shares}) == 1
    for share in shares:
        assert [row.last for row in share] == [False] * (len(share) - 1) + [
            True
        ] * bool(share)
    assert all(
        len({len(row.values) for row in step}) == 1
        for step in zip(*shares, strict=True)
    )


class BucketSampler(Sampler[list[int]]):
    """Batches of varying size, in an order drawn from Python's global random state."""

    def __init__(self, size: int, drop_last: bool = False) -> None:
        self.size = size
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.size))
        random.shuffle(order)
        sizes = itertools.cycle((3, 1, 4, 2))
        while order:
            count = next(sizes)
            yield order[:count]
            order = order[count:]


class EndlessSampler(Sampler[int]):
    """A sampler without end or length, drawing from numpy's global random state."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from np.random.permutation(self.size).tolist()


class OwnRandomSampler(RandomSampler):
    """A user's subclass: to be respected, not replaced."""


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_shuffled_and_sequential(world: int) -> None:
    for shuffle, seedable in itertools.product((False, True), repeat=2):

        def build(shuffle: bool = shuffle) -> DataLoader[Any]:
            return DataLoader(DATA, batch_size=3, shuffle=shuffle)  # type: ignore[arg-type] # a list is a dataset

        shares = shares_of(build, world, use_seedable_sampler=seedable)
        check_even(shares)
        order = global_order(shares)
        assert sorted(order) == DATA
        assert (order == DATA) is not shuffle
        assert order == global_order(shares_of(build, 1, use_seedable_sampler=seedable))
        if shuffle:
            assert order != global_order(
                shares_of(build, world, epochs=2, use_seedable_sampler=seedable)
            )


@pytest.mark.parametrize("world", [1, 2, 4])
def test_torchs_random_samplers_draw_alike_on_every_rank(world: int) -> None:
    samplers: list[tuple[Callable[[], Any], int]] = [
        (lambda: WeightedRandomSampler([1.0] * 20 + [50.0] * 3, 23), 23),
        (lambda: SubsetRandomSampler(range(5, 17)), 12),
        (lambda: RandomSampler(DATA, replacement=True, num_samples=31), 31),
        (lambda: RandomSampler(DATA, num_samples=10), 10),
        (lambda: OwnRandomSampler(DATA), 23),
    ]
    for make, size in samplers:

        def build(make: Callable[[], Any] = make) -> DataLoader[Any]:
            return DataLoader(DATA, batch_size=3, sampler=make())  # type: ignore[arg-type]

        shares = shares_of(build, world)
        check_even(shares)
        order = global_order(shares)
        assert len(order) == size
        assert order == global_order(shares_of(build, 1))
        second_order = global_order(shares_of(build, world, epochs=2))
        assert order != second_order
    assert (
        sum(
            value >= 20
            for value in global_order(shares_of(lambda: weighted_loader(), world))
        )
        > 12
    )


def weighted_loader() -> DataLoader[Any]:
    return DataLoader(
        DATA,  # type: ignore[arg-type]
        batch_size=3,
        sampler=WeightedRandomSampler([1.0] * 20 + [50.0] * 3, 23),
    )


def test_a_generator_the_user_gave_is_used_as_torch_would() -> None:
    def build() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(5)
        return DataLoader(
            DATA,  # type: ignore[arg-type]
            batch_size=4,
            sampler=RandomSampler(DATA, generator=generator),
        )

    plain = [
        [int(value) for batch in loader for value in batch]
        for loader in [build()]
        for _ in range(2)
    ]
    loader = prepared(build(), use_seedable_sampler=False)
    assert [global_order([seen(loader)]) for _ in range(2)] == plain


def test_a_distributed_sampler_of_the_user_is_not_sharded_twice() -> None:
    for drop_last, batch in itertools.product((False, True), (2, 3)):
        shares, reals = [], []
        for rank in range(3):
            sampler: Any = DistributedSampler(
                DATA,  # type: ignore[arg-type]
                num_replicas=3,
                rank=rank,
                shuffle=True,
                drop_last=drop_last,
            )
            plain: DataLoader[Any] = DataLoader(DATA, batch_size=batch, sampler=sampler)  # type: ignore[arg-type]
            expected = [values.tolist() for values in plain]
            loader = prepared(plain, rank, 3)
            share = seen(loader)
            assert [row.values for row in share] == expected
            assert len(loader) == len(plain)
            shares.append(share)
            reals += [value for row in share for value in row.values[: row.real]]
            # the epoch is set by itself
            assert [row.values for row in seen(loader)] != expected
        assert len(reals) == len(set(reals)) == (21 if drop_last else 23)
    wrong: Any = DistributedSampler(DATA, num_replicas=2, rank=0)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="num_replicas=3, rank=1"):
        prepared(DataLoader(DATA, sampler=wrong), 1, 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Remove the sampler"):
        prepared(DataLoader(DATA, sampler=wrong), 0, 2, dispatch_batches=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_batch_samplers_of_varying_size_are_dealt_out_whole(world: int) -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(DATA, batch_sampler=BucketSampler(23))  # type: ignore[arg-type]

    shares = shares_of(build, world)
    assert len({len(share) for share in shares}) == 1
    assert sorted(global_order(shares)) == DATA
    assert all(row.real in (0, len(row.values)) for share in shares for row in share)
    sizes = [
        len(row.values)
        for step in zip(*shares, strict=True)
        for row in step
        if row.real
    ]
    assert sizes == [3, 1, 4, 2, 3, 1, 4, 2, 3]
    uneven = shares_of(build, world, even_batches=False)
    assert sorted(global_order(uneven)) == DATA
    assert sum(map(len, uneven)) == 9
    dropping = shares_of(
        lambda: DataLoader(DATA, batch_sampler=BucketSampler(23, True)),  # type: ignore[arg-type]
        world,
    )
    assert [len(share) for share in dropping] == [9 // world] * world


def test_batches_of_varying_size_can_be_split() -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(DATA, batch_sampler=BucketSampler(23))  # type: ignore[arg-type]

    shares = shares_of(build, 2, split_batches=True)
    check_even(shares)
    assert sorted(global_order(shares)) == DATA
    assert [len(row.values) for row in shares[0]] == [2, 1, 2, 1, 2, 1, 2, 1, 2]
    with pytest.raises(DataError, match="Use batches of at least 2 rows"):
        shares_of(build, 2, split_batches=True, even_batches=False)


def test_a_plain_batch_sampler_is_as_good_as_a_batch_size() -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(
            DATA,  # type: ignore[arg-type]
            batch_sampler=BatchSampler(RandomSampler(DATA), 4, True),
        )

    shares = shares_of(build, 2)
    check_even(shares)
    assert shares == shares_of(
        lambda: DataLoader(DATA, batch_size=4, shuffle=True, drop_last=True),  # type: ignore[arg-type]
        2,
    )


def test_split_batches_read_the_same_global_batches_on_any_world() -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(DATA, batch_size=4, shuffle=True)  # type: ignore[arg-type]

    one_rank_shares = shares_of(build, 1, split_batches=True)
    for world in (2, 4):
        shares = shares_of(build, world, split_batches=True)
        check_even(shares)
        assert global_order(shares) == global_order(one_rank_shares)
        assert len(shares[0]) == len(one_rank_shares[0])
        assert prepared(build(), 0, world, split_batches=True).batch_size == 4 // world


@pytest.mark.parametrize("num_workers", [0, 2])
def test_items_without_automatic_batching(num_workers: int) -> None:
    batches = [torch.arange(first, first + 3) for first in range(0, 21, 3)]

    def build() -> DataLoader[Any]:
        return DataLoader(
            batches,  # type: ignore[arg-type]
            batch_size=None,
            shuffle=True,
            num_workers=num_workers,
        )

    shares = shares_of(build, 2)
    check_even(shares)
    assert sorted(global_order(shares)) == list(range(21))
    assert shares[1][-1].real == 0
    for dispatch in (False, True):
        with pytest.raises(
            ConfigError, match="split_batches=True with batch_size=None"
        ):
            prepared(build(), split_batches=True, dispatch_batches=dispatch)


def test_an_endless_sampler_without_length() -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(DATA, batch_size=2, sampler=EndlessSampler(23))  # type: ignore[arg-type]

    loaders = [prepared(build(), rank, 2) for rank in range(2)]
    with pytest.raises(TypeError, match="no length"):
        len(loaders[0])
    shares = [seen(loader, limit=40) for loader in loaders]
    order = global_order(shares)
    assert Counter(order[: 23 * 6]) == Counter(DATA * 6)
    assert not any(row.last for share in shares for row in share)
    resumed = prepared(build(), 1, 2)
    resumed.load_state_dict(loaders[1].state_dict())
    assert seen(resumed, limit=5) == batches_after(build, 40, 5)


def batches_after(build: Build, skipped: int, count: int) -> list[SeenBatches]:
    return seen(prepared(build(), 1, 2), limit=skipped + count)[skipped:]


def test_hub_datasets_map_style() -> None:
    table = datasets.Dataset.from_dict(
        {"x": DATA, "y": [str(value) for value in DATA]}
    ).with_format("torch")

    def read(rank: int, num_workers: int) -> list[Any]:
        loader = prepared(
            DataLoader(table, batch_size=4, shuffle=True, num_workers=num_workers),
            rank,
            2,
        )
        return [
            value
            for batch in loader
            for value in batch["x"].tolist()[: loader.cursor.num_real]
        ]

    for num_workers in (0, 2):
        assert sorted(read(0, num_workers) + read(1, num_workers)) == DATA


def rows_of(shard: list[list[int]]) -> Iterator[dict[str, int]]:
    for shard_values in shard:
        for value in shard_values:
            yield {"x": value}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_shards", [1, 2, 4, 5])
def test_hub_streams_use_their_shards_when_there_are_enough(
    num_shards: int, num_workers: int
) -> None:
    if num_workers > num_shards // 2:
        pytest.skip("datasets warns about idle workers")
    values_by_shard = [
        [shard * 100 + value for value in range(6)] for shard in range(num_shards)
    ]
    stream = datasets.IterableDataset.from_generator(
        rows_of, gen_kwargs={"shard": values_by_shard}
    )
    assert stream.num_shards == num_shards
    read_values: list[int] = []
    for rank in range(2):
        loader = prepared(
            DataLoader(stream, batch_size=2, num_workers=num_workers, collate_fn=xs_of),
            rank,
            2,
        )
        share = seen(loader)
        rank_values = [value for row in share for value in row.values[: row.real]]
        if num_shards >= 2:
            assert len({value // 100 for value in rank_values}) in (
                num_shards // 2,
                -(-num_shards // 2),
            )
        read_values += rank_values
    assert sorted(read_values) == sorted(
        value for shard_values in values_by_shard for value in shard_values
    )


def xs_of(samples: list[dict[str, int]]) -> list[int]:
    return [sample["x"] for sample in samples]


class SelfShardingStream(IterableDataset[int]):
    """A stream that gives the part it is asked for."""

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def shard(self, num_shards: int, index: int) -> SelfShardingStream:
        return SelfShardingStream(self.values[index::num_shards])

    def __iter__(self) -> Iterator[int]:
        return iter(self.values)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_streams_that_can_shard_themselves_are_asked_per_rank_and_worker(
    num_workers: int,
) -> None:
    shares = shares_of(
        lambda: DataLoader(
            SelfShardingStream(list(range(24))), batch_size=3, num_workers=num_workers
        ),
        2,
    )
    assert sorted(global_order(shares)) == list(range(24))
    num_shards = 2 * max(num_workers, 1)
    for rank, share in enumerate(shares):
        for row in share:
            (shard_index,) = {value % num_shards for value in row.values}
            assert shard_index // max(num_workers, 1) == rank


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stateful_loaders_of_torchdata(num_workers: int) -> None:
    with pytest.warns(UserWarning, match="set_vital"):
        loaders = [
            StatefulDataLoader(
                DATA, batch_size=3, shuffle=True, num_workers=num_workers
            )
            for _ in range(3)
        ]
    shares = [
        seen(prepared(loader, rank, 2)) for rank, loader in enumerate(loaders[:2])
    ]
    check_even(shares)
    assert sorted(global_order(shares)) == DATA
    plain: DataLoader[Any] = DataLoader(DATA, batch_size=3, shuffle=True)  # type: ignore[arg-type]
    assert shares[0] == seen(prepared(plain, 0, 2))
    loaders[2].load_state_dict(loaders[2].state_dict())
    with pytest.raises(PrepareError, match="Prepare the loader first"):
        prepared(loaders[2], use_stateful_dataloader=True)


@pytest.mark.parametrize(
    "num_workers", [0, pytest.param(2, marks=pytest.mark.exhaustive)]
)
def test_streams_follow_their_laws_at_every_size(num_workers: int) -> None:
    sizes, batches, worlds = (
        ((0, 1, 2, 3, 5, 8, 11, 12, 25), (1, 2, 3), (1, 2, 3))
        if not num_workers
        else ((1, 16), (2,), (3,))
    )
    for size, batch, world in itertools.product(sizes, batches, worlds):
        for drop_last, even in itertools.product((False, True), repeat=2):

            def build(
                size: int = size, batch: int = batch, drop_last: bool = drop_last
            ) -> DataLoader[Any]:
                return DataLoader(
                    CountingStream(size),
                    batch_size=batch,
                    drop_last=drop_last,
                    num_workers=num_workers,
                )

            shares = shares_of(build, world, even_batches=even)
            order = global_order(shares)
            workers = max(num_workers, 1)
            if drop_last:
                per_worker = [
                    len(range(worker, size, workers)) for worker in range(workers)
                ]
                assert len(order) == sum(
                    count - count % (batch * world) for count in per_worker
                )
                assert len(set(order)) == len(order)
            else:
                assert sorted(order) == list(range(size))
            if even:
                check_even(shares)
            else:
                assert all(
                    row.real == len(row.values) for share in shares for row in share
                )


def test_streams_of_batches_and_split_streams() -> None:
    batches = [torch.arange(first, first + 4) for first in range(0, 20, 4)]

    class BatchStream(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(batches)

    shares = shares_of(lambda: DataLoader(BatchStream(), batch_size=None), 2)
    check_even(shares)
    assert global_order(shares) == list(range(20))
    assert shares[1][-1].real == 0
    with pytest.raises(ConfigError, match="split_batches=True with batch_size=None"):
        prepared(DataLoader(BatchStream(), batch_size=None), split_batches=True)
    rows = shares_of(
        lambda: DataLoader(CountingStream(22), batch_size=4), 2, split_batches=True
    )
    check_even(rows)
    assert sorted(global_order(rows)) == list(range(22))
    assert [len(row.values) for row in rows[0]] == [2] * 5 + [1], (
        "the last two are spread over both ranks"
    )


def test_a_stream_with_a_length_gives_the_loader_one() -> None:
    class SizedStream(CountingStream):
        def __len__(self) -> int:
            return self.size

    for size, world in itertools.product((0, 5, 12, 13), (1, 2, 3)):
        for drop_last, even in itertools.product((False, True), repeat=2):
            for rank in range(world):
                user = DataLoader(SizedStream(size), batch_size=2, drop_last=drop_last)
                loader = prepared(user, rank, world, even_batches=even)
                assert len(loader) == len(seen(loader))


class RangedStream(IterableDataset[int]):
    """The stream of torch's documentation whose range is set in each worker by the worker_init_fn."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))


def take_own_range(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    share = (dataset.end - dataset.start) // info.num_workers
    dataset.start += worker * share
    dataset.end = dataset.start + share


def test_a_worker_init_fn_can_arrange_the_stream_of_its_worker() -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(
            RangedStream(0, 16),
            batch_size=2,
            num_workers=2,
            worker_init_fn=take_own_range,
        )

    plain = [batch.tolist() for batch in build()]
    assert [row.values for row in seen(prepared(build()))] == plain
    assert sorted(global_order(shares_of(build, 2))) == list(range(16))
