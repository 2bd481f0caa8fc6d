"""Loaders that hold each rank's own part of the data: every sample once and an exact resume, or an error with the way out."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import datasets
import numpy as np
import pytest
import torch
import torch.distributed as dist
from datasets.distributed import split_dataset_by_node
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    get_worker_info,
)

from hasten import Accelerator
from hasten.errors import ConfigError, DataError, PeerFailedError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from tests.support.loaders import CountingStream, SeenBatches, prepared, seen

PRELOAD: Final = ("datasets",)

# Any in this file: loaders, samplers and batches of many kinds.
SIZE = 25


def fork(workers: int) -> dict[str, Any]:
    return (
        {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    )


class RankStream(IterableDataset[int]):
    """Asks torch for its rank, and shuffles with python's generator before it splits."""

    def __init__(self, size: int, shuffles: bool = False) -> None:
        self.size, self.shuffles = size, shuffles

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.size))
        if self.shuffles:
            random.shuffle(order)
        rank_order = order[dist.get_rank() :: dist.get_world_size()]
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(rank_order[first::step])


class SizedRankStream(RankStream):
    def __len__(self) -> int:
        return len(range(dist.get_rank(), self.size, dist.get_world_size()))


class RankItems(Dataset[int]):
    """Knows its rank, and computes the samples of its part."""

    def __init__(self, size: int) -> None:
        self.size, self.rank, self.world = size, dist.get_rank(), dist.get_world_size()

    def __len__(self) -> int:
        return len(range(self.rank, self.size, self.world))

    def __getitem__(self, index: int) -> int:
        return index * self.world + self.rank


class SilentRankItems(Dataset[int]):
    """Asks for its rank when a sample is read."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size // dist.get_world_size()

    def __getitem__(self, index: int) -> int:
        return index * dist.get_world_size() + dist.get_rank()


class RankSampler(Sampler[int]):
    """Shuffles with torch's generator, and yields its rank's indices."""

    def __init__(self, size: int, shuffles: bool = True) -> None:
        self.size, self.shuffles = size, shuffles

    def __iter__(self) -> Iterator[int]:
        order = (
            torch.randperm(self.size).tolist()
            if self.shuffles
            else list(range(self.size))
        )
        return iter(order[dist.get_rank() :: dist.get_world_size()])

    def __len__(self) -> int:
        return len(range(dist.get_rank(), self.size, dist.get_world_size()))


class RankBatches(Sampler[list[int]]):
    """Yields its rank's batches, of two sizes."""

    def __init__(self, size: int) -> None:
        self.size, self.drop_last = size, False

    def __iter__(self) -> Iterator[list[int]]:
        rank_rows = list(range(dist.get_rank(), self.size, dist.get_world_size()))
        rows = itertools.cycle((2, 3))
        while rank_rows:
            count = next(rows)
            yield rank_rows[:count]
            rank_rows = rank_rows[count:]

    def __len__(self) -> int:
        return sum(1 for _ in self)


def mine(ctx: ProcessContext, size: int = SIZE) -> range:
    return range(ctx.rank, size, ctx.world.size)


def numbers(size: int = SIZE) -> Any:
    return datasets.Dataset.from_dict({"x": list(range(size))})


def of_x(rows: Any) -> torch.Tensor:
    return torch.tensor([row["x"] for row in rows])


def items(data: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=3, **options)


Build = Callable[[ProcessContext], DataLoader[Any]]
KINDS: dict[str, Build] = {
    "stream": lambda ctx: items(RankStream(SIZE)),
    "stream that shuffles": lambda ctx: items(RankStream(SIZE, shuffles=True)),
    "stream with workers": lambda ctx: items(RankStream(SIZE), **fork(2)),
    "sized stream": lambda ctx: items(SizedRankStream(SIZE)),
    "part of a list": lambda ctx: items(list(mine(ctx))),
    "shuffled part": lambda ctx: items(list(mine(ctx)), shuffle=True),
    "shuffled part with workers": lambda ctx: items(
        list(mine(ctx)), shuffle=True, **fork(2)
    ),
    "subset": lambda ctx: items(Subset(list(range(SIZE)), mine(ctx))),  # type: ignore[arg-type]
    "tensors": lambda ctx: items(torch.arange(SIZE)[ctx.rank :: ctx.world.size]),
    "computed part": lambda ctx: items(RankItems(SIZE)),
    "sampler": lambda ctx: items(list(range(SIZE)), sampler=RankSampler(SIZE)),
    "range as sampler": lambda ctx: items(list(range(SIZE)), sampler=mine(ctx)),
    "subset sampler": lambda ctx: items(
        list(range(SIZE)), sampler=SubsetRandomSampler(mine(ctx))
    ),
    "batch sampler": lambda ctx: DataLoader(
        range(SIZE),  # type: ignore[arg-type]
        batch_sampler=RankBatches(SIZE),
    ),
    "items": lambda ctx: DataLoader(
        TensorDataset(torch.arange(SIZE)[ctx.rank :: ctx.world.size]), batch_size=None
    ),
}
RECOGNISED: dict[str, Build] = {
    "split stream by shards": lambda ctx: items(
        split_dataset_by_node(
            numbers(24).to_iterable_dataset(2 * ctx.world.size),
            ctx.rank,
            ctx.world.size,
        ),
        collate_fn=of_x,
    ),
    "split stream by examples": lambda ctx: items(
        split_dataset_by_node(
            numbers().to_iterable_dataset(1).shuffle(seed=3), ctx.rank, ctx.world.size
        ),
        collate_fn=of_x,
    ),
}
UNDECLARED: dict[str, Build] = {
    "split_dataset_by_node": lambda ctx: items(
        split_dataset_by_node(numbers(), ctx.rank, ctx.world.size),
        collate_fn=of_x,
        shuffle=True,
    ),
    "shard": lambda ctx: items(
        numbers().shard(ctx.world.size, ctx.rank), collate_fn=of_x
    ),
    "strided shard": lambda ctx: items(
        numbers().shuffle(seed=1).shard(ctx.world.size, ctx.rank, contiguous=False),
        collate_fn=of_x,
    ),
    "sharded stream": lambda ctx: items(
        numbers().to_iterable_dataset(5).shard(ctx.world.size, ctx.rank),
        collate_fn=of_x,
    ),
}


def as_list(batch: Any) -> Any:
    return batch[0].reshape(-1) if isinstance(batch, list) else batch


def rows_of(
    loader: Any, limit: int | None = None
) -> list[tuple[list[int], int | None, bool]]:
    out = []
    for batch in loader:
        values = as_list(batch)
        out.append(
            (values.reshape(-1).tolist(), loader.cursor.num_real, loader.cursor.at_end)
        )
        if len(out) == limit:
            break
    return out


def real(rows: list[tuple[list[int], int | None, bool]]) -> list[int]:
    return [sample for values, count, _ in rows for sample in values[:count]]


def check_once_and_resume(
    ctx: ProcessContext, build: Build, size: int = SIZE, **settings: Any
) -> None:
    """Every sample once over the ranks, in as many steps on each, and an exact resume after every step of two epochs."""
    loader = prepared(build(ctx), ctx=ctx, **settings)
    uninterrupted = [rows_of(loader), rows_of(loader)]
    for epoch in uninterrupted:
        everyone = ctx.world.all_gather_object(real(epoch))
        assert sorted(itertools.chain(*everyone)) == list(range(size))
        assert len(set(ctx.world.all_gather_object(len(epoch)))) == 1, (
            "as many steps on every rank"
        )
        assert [last for _, _, last in epoch] == [False] * (len(epoch) - 1) + [True]
    stops = ctx.world.broadcast_object(
        [1, len(uninterrupted[0]) // 2, len(uninterrupted[0])]
    )
    for stop in stops:
        first = prepared(build(ctx), ctx=ctx, **settings)
        assert rows_of(first, stop) == uninterrupted[0][:stop]
        state = json.loads(json.dumps(first.state_dict()))
        second = prepared(build(ctx), ctx=ctx, seed=99, **settings)
        second.load_state_dict(state)
        assert rows_of(second) == uninterrupted[0][stop:], f"stopped after {stop}"
        assert rows_of(second) == uninterrupted[1]


@pytest.mark.parametrize("kind", KINDS)
@ranks(2, exhaustive=(3, 4))
def test_parts_are_read_as_they_are(ctx: ProcessContext, kind: str) -> None:
    check_once_and_resume(ctx, KINDS[kind], already_sharded=True)


@pytest.mark.parametrize("kind", KINDS)
@ranks(2, exhaustive=(3, 4))
def test_parts_without_the_flag_are_refused(ctx: ProcessContext, kind: str) -> None:
    with pytest.raises(DataError, match=r"(?s)already_sharded=True.*") as caught:
        list(prepared(KINDS[kind](ctx), ctx=ctx))
    assert "prepare_data_loader(" in str(caught.value)
    assert "give every rank the" in str(caught.value).lower()


@ranks(2)
def test_parts_of_equal_length_are_refused_too(ctx: ProcessContext) -> None:
    even = 24
    subset: Any = Subset(range(even), mine(ctx, even))  # type: ignore[arg-type]
    split_datasets: list[Any] = [
        list(mine(ctx, even)),
        RankItems(even),
        SilentRankItems(even),
        subset,
    ]
    for data in split_datasets:
        for options in ({}, fork(1)):
            with pytest.raises(DataError, match="already_sharded=True"):
                prepared(items(data, **options), ctx=ctx)


@pytest.mark.parametrize("kind", RECOGNISED)
@ranks(2, exhaustive=(3, 4))
def test_what_other_packages_split_is_recognised(
    ctx: ProcessContext, kind: str
) -> None:
    size = 24 if kind == "split stream by shards" else SIZE
    check_once_and_resume(ctx, RECOGNISED[kind], size)


@pytest.mark.parametrize("kind", UNDECLARED)
@ranks(2)
def test_parts_of_a_dataset_that_do_not_say_so_are_refused_and_read_with_the_flag(
    ctx: ProcessContext, kind: str
) -> None:
    with pytest.raises(DataError, match="already_sharded=True"):
        list(prepared(UNDECLARED[kind](ctx), ctx=ctx))
    check_once_and_resume(ctx, UNDECLARED[kind], already_sharded=True)


@ranks(2)
def test_random_data_without_a_seed_names_the_seed_first(ctx: ProcessContext) -> None:
    torch.manual_seed(ctx.rank)
    with pytest.raises(
        DataError,
        match=r"set_seed\(0\) before random data is made.*already_sharded=True",
    ):
        prepared(items(TensorDataset(torch.randn(24, 4))), ctx=ctx)


class FromOneReader(IterableDataset[int]):
    """Can be read only once, and knows its length."""

    def __init__(self, size: int) -> None:
        self.size, self.reader = size, iter(range(size))

    def __iter__(self) -> Iterator[int]:
        return self.reader

    def __len__(self) -> int:
        return self.size


@ranks(2)
def test_a_stream_that_can_be_read_only_once_loses_nothing_to_the_comparison(
    ctx: ProcessContext,
) -> None:
    read = ctx.world.all_gather_object(
        real(rows_of(prepared(items(FromOneReader(24)), ctx=ctx)))
    )
    assert sorted(itertools.chain(*read)) == list(range(24))


@ranks(2)
def test_a_split_for_other_ranks_is_refused(ctx: ProcessContext) -> None:
    stream = split_dataset_by_node(numbers().to_iterable_dataset(4), 0, 4)
    with pytest.raises(
        DataError, match=r"into 4 parts, of which this is part 0.*Split it into 2 parts"
    ):
        prepared(items(stream, collate_fn=of_x), ctx=ctx)


@ranks(2)
def test_mapped_shards_and_copies_in_other_orders_are_refused(
    ctx: ProcessContext,
) -> None:
    shard = numbers(24).shard(2, ctx.rank).map(lambda row: {"x": row["x"] + 1})
    copied = numbers(24).shuffle(seed=ctx.rank)
    for data in (shard, copied):
        with pytest.raises(DataError, match="already_sharded=True"):
            prepared(items(data, collate_fn=of_x), ctx=ctx)


@ranks(2, exhaustive=(3, 4))
def test_parts_end_with_the_big_batch(ctx: ProcessContext) -> None:
    """Parts of one size, or one more, are cut as the whole data is: at most processes - 1 samples are repeated."""
    for size, batch in itertools.product((1 + ctx.world.size, 24, 25, 26), (1, 3, 4)):
        loader = prepared(
            DataLoader(list(mine(ctx, size)), batch_size=batch),  # type: ignore[arg-type]
            ctx=ctx,
            already_sharded=True,
        )
        rows = ctx.world.all_gather_object(rows_of(loader))
        assert len(loader) == len(rows[ctx.rank])
        for step in zip(*rows, strict=True):
            assert len({len(values) for values, _, _ in step}) == 1
        read = Counter(
            sample for share in rows for values, _, _ in share for sample in values
        )
        assert sum(read.values()) - size <= ctx.world.size - 1
        assert set(read) == set(range(size))


@ranks(2, exhaustive=(3,))
def test_uneven_parts_end_by_the_policy(ctx: ProcessContext) -> None:
    """Rank r has 4 + 5 r samples: the longest, the shortest, or each alone."""
    size = 4 + 5 * ctx.rank
    longest, shortest = 4 + 5 * (ctx.world.size - 1), 4
    base = 100 * ctx.rank
    for kind in ("list", "sampler", "stream"):

        def build(drop_last: bool = False, kind: str = kind) -> Any:
            data: Any = list(range(base, base + size))
            if kind == "stream":
                data = Shifted(base, size)
            sampler = OneByOne(size) if kind == "sampler" else None
            return DataLoader(data, batch_size=2, sampler=sampler, drop_last=drop_last)

        loader = prepared(build(), ctx=ctx, already_sharded=True)
        rows = rows_of(loader)
        assert len(rows) == -(-longest // 2)
        assert real(rows) == list(range(base, base + size))
        assert set(itertools.chain(*(values for values, _, _ in rows))) == set(
            range(base, base + size)
        )
        assert rows[-1][2]
        dropped = rows_of(prepared(build(True), ctx=ctx, already_sharded=True))
        assert [values for values, _, _ in dropped] == [
            [base, base + 1],
            [base + 2, base + 3],
        ]
        assert len(dropped) == shortest // 2
        uneven_rows = rows_of(
            prepared(build(), ctx=ctx, already_sharded=True, even_batches=False)
        )
        assert real(uneven_rows) == list(range(base, base + size))
        assert len(uneven_rows) == -(-size // 2)


class Shifted(IterableDataset[int]):
    def __init__(self, base: int, size: int) -> None:
        self.base, self.size = base, size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.base, self.base + self.size))


class OneByOne(Sampler[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))

    def __len__(self) -> int:
        return self.size


class WithoutLength(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


class Underestimated(OneByOne):
    def __len__(self) -> int:
        return self.size - 1


class Counted(Dataset[int]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index


class BreakingStream(IterableDataset[int]):
    def __init__(self, fails_at: int | None) -> None:
        self.at = fails_at

    def __iter__(self) -> Iterator[int]:
        for number in range(8):
            if number == self.at:
                raise ValueError("a broken record")
            yield number


@ranks(2)
def test_a_rank_that_fails_or_has_nothing_leaves_no_other_waiting(
    ctx: ProcessContext,
) -> None:
    for fails_at, sharded in ((0, None), (3, None), (0, True), (3, True)):
        loader = prepared(
            items(BreakingStream(fails_at if ctx.rank else None)),
            ctx=ctx,
            already_sharded=sharded,
        )
        with pytest.raises(ValueError if ctx.rank else PeerFailedError):
            list(loader)
    for empty in (items(list(range(3 * ctx.rank))), items(Shifted(0, 3 * ctx.rank))):
        with pytest.raises(DataError, match=r"rank\(s\) 0"):
            list(prepared(empty, ctx=ctx, already_sharded=True))


@ranks(2)
def test_samplers_of_parts_have_a_correct_length(ctx: ProcessContext) -> None:
    with pytest.raises(DataError, match=r"has no length.*Implement __len__"):
        prepared(
            items(Counted(), sampler=WithoutLength()), ctx=ctx, already_sharded=True
        )
    uneven_loader = prepared(
        items(Counted(), sampler=WithoutLength()),
        ctx=ctx,
        already_sharded=True,
        even_batches=False,
    )
    assert real(rows_of(uneven_loader)) == list(range(6))
    loader = prepared(
        items(Counted(), sampler=Underestimated(6)), ctx=ctx, already_sharded=True
    )
    with pytest.raises(DataError, match="more indices than its length"):
        rows_of(loader)


@ranks(2)
def test_settings_that_cannot_be_honoured_are_refused(ctx: ProcessContext) -> None:
    with pytest.raises(
        ConfigError, match="dispatch_batches=True with data that is already sharded"
    ):
        prepared(
            items(list(mine(ctx))), ctx=ctx, already_sharded=True, dispatch_batches=True
        )
    with pytest.raises(ConfigError, match="dispatch_batches=True"):
        prepared(
            RECOGNISED["split stream by examples"](ctx), ctx=ctx, dispatch_batches=True
        )
    with pytest.raises(ConfigError, match="split_batches=True"):
        prepared(
            KINDS["batch sampler"](ctx),
            ctx=ctx,
            already_sharded=True,
            split_batches=True,
        )
    split = prepared(
        DataLoader(list(mine(ctx)), batch_size=6),  # type: ignore[arg-type]
        ctx=ctx,
        already_sharded=True,
        split_batches=True,
    )
    assert [len(values) for values, _, _ in rows_of(split)] == [3, 3, 3, 3, 1]
    assert split.total_batch_size == 6


@ranks(2)
def test_one_loader_can_say_it_for_itself(ctx: ProcessContext) -> None:
    accelerator = Accelerator(context=ctx)
    split_loader = accelerator.prepare_data_loader(
        items(list(mine(ctx))), already_sharded=True
    )
    full_loader = accelerator.prepare(items(list(range(SIZE))))
    for loader in (split_loader, full_loader):
        read = ctx.world.all_gather_object(real(rows_of(loader)))
        assert sorted(itertools.chain(*read)) == list(range(SIZE))
    accelerator.free_memory()


@ranks(2)
def test_a_position_inside_an_epoch_belongs_to_the_parts(ctx: ProcessContext) -> None:
    full_loader = items(list(range(20)))
    split_loader = prepared(items(list(mine(ctx, 20))), ctx=ctx, already_sharded=True)
    rows_of(split_loader, 2)
    state = split_loader.state_dict()
    for mismatched in (prepared(full_loader, ctx=ctx), prepared(full_loader)):
        mismatched.load_state_dict(state)
        with pytest.raises(DataError, match="Resume on 2 data-parallel processes"):
            list(mismatched)
    shorter = prepared(items(list(mine(ctx, 18))), ctx=ctx, already_sharded=True)
    shorter.load_state_dict(state)
    with pytest.raises(DataError, match=r"had|part with 10"):
        list(shorter)


@ranks(2)
def test_a_distributed_sampler_without_batches_is_not_sharded_twice(
    ctx: ProcessContext,
) -> None:
    data: Any = torch.arange(20)
    sampler: Any = DistributedSampler(
        data, num_replicas=2, rank=ctx.rank, shuffle=False
    )
    loader = prepared(DataLoader(data, batch_size=None, sampler=sampler), ctx=ctx)
    read = [int(row) for row in loader]
    assert read == list(range(ctx.rank, 20, 2))


# -- no false alarms ------------------------------------------------------------------------------------------------------
class Augmented(Dataset[tuple[torch.Tensor, int]]):
    """Knows its rank, and draws from every generator there is."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank, self.device = size, rank, f"cuda:{rank}"
        self.rng = np.random.default_rng(rank)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = (
            random.random()
            + np.random.rand()
            + np.random.default_rng().random()
            + self.rng.random()
        )
        return torch.rand(3) + noise, index % 3


class Labelled(Augmented):
    """Seeds the augmentation of every sample by rank."""

    def __getitem__(self, index: int) -> Any:
        return {
            "x": np.random.default_rng((self.rank, index)).random(4),
            "id": index,
            "who": object(),
            "rank": self.rank,
        }


class AugmentedStream(IterableDataset[Any]):
    def __init__(self, size: int, rank: int, fresh: bool) -> None:
        self.size, self.rank, self.fresh = size, rank, fresh
        self.rng = np.random.default_rng(rank)

    def __iter__(self) -> Iterator[Any]:
        rng = np.random.default_rng() if self.fresh else self.rng
        for number in range(self.size):
            yield number, torch.rand(2) + float(rng.random()) + random.random()


class SizedAugmented(AugmentedStream):
    def __len__(self) -> int:
        return self.size


class Unseeded(Sampler[int]):
    def __init__(self, size: int, has_generator: bool) -> None:
        self.size, self.rng = size, np.random.default_rng() if has_generator else None

    def __iter__(self) -> Iterator[int]:
        rng = self.rng or np.random.default_rng()
        return iter(rng.integers(self.size, size=self.size).tolist())


def plainly(samples: Any) -> torch.Tensor:
    first = [
        sample["id"]
        if isinstance(sample, dict)
        else sample[1]
        if isinstance(sample[1], int)
        else sample[0]
        for sample in samples
    ]
    return torch.tensor([int(sample_id) for sample_id in first])


@ranks(2)
def test_healthy_loaders_are_not_taken_for_parts(ctx: ProcessContext) -> None:
    random.seed(ctx.rank)
    np.random.seed(ctx.rank)
    torch.manual_seed(ctx.rank)
    data: list[Any] = [
        Augmented(24, ctx.rank),
        Labelled(24, ctx.rank),
        Subset(Augmented(30, ctx.rank), range(24)),
    ]
    data += [
        kind(24, ctx.rank, fresh)
        for kind in (AugmentedStream, SizedAugmented)
        for fresh in (False, True)
    ]
    for dataset, workers in itertools.product(data, (0, 1)):
        loader = prepared(
            DataLoader(dataset, batch_size=4, collate_fn=plainly, **fork(workers)),
            ctx=ctx,
        )
        assert len(seen(loader)) == 3
    indices: Any = list(range(24))
    for make in (partial(Unseeded, 24, True), partial(Unseeded, 24, False)):
        for wrapped in (False, True):
            sampler: Any = make()
            options = (
                {"batch_sampler": OwnBatches(sampler, 4, False)}
                if wrapped
                else {"sampler": sampler, "batch_size": 4}
            )
            loader = prepared(DataLoader(indices, **options), ctx=ctx)
            assert len(seen(loader)) == 3


class OwnBatches(BatchSampler):
    """A class of the user's."""


@ranks(2)
def test_the_comparison_leaves_no_trace(ctx: ProcessContext) -> None:
    """Random states of the training, what the sampler and the dataset remember, and the batches are as without it."""

    def passes(sharded: bool | None) -> tuple[list[list[SeenBatches]], list[float]]:
        torch.manual_seed(3)
        random.seed(4)
        np.random.seed(5)
        out = []
        for user in (
            items(list(range(20)), sampler=Counting(20)),
            items(CountingStream(20)),
        ):
            loader = prepared(user, ctx=ctx, already_sharded=sharded)
            out += [seen(loader), seen(loader)]
        return out, [random.random(), float(np.random.rand()), float(torch.rand(()))]

    assert passes(None) == passes(False)


class Counting(Sampler[int]):
    """Counts its epochs and draws from a generator of its own."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch, self.rng = size, 0, random.Random(7)

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(self.rng.sample(range(self.size), self.size)[self.epoch - 1 :])


@ranks(2)
def test_one_rank_may_look_at_a_batch_alone(ctx: ProcessContext) -> None:
    """Map-style data and streams with a length are read without an exchange, also when they look suspicious."""
    for dataset in (Augmented(24, ctx.rank), SizedAugmented(24, ctx.rank, False)):
        loader = prepared(
            DataLoader(dataset, batch_size=4, collate_fn=plainly), ctx=ctx
        )
        if ctx.rank == 0:
            next(iter(loader))


def _cut_by_closure(rows: list[int]) -> Dataset[int]:
    class Held(Dataset[int]):
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, index: int) -> int:
            return rows[index]

    return Held()


class _Slotted(Dataset[int]):
    __slots__ = ("rows",)

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> int:
        return self.rows[index]


@ranks(2)
def test_parts_in_closures_and_slots_are_found(ctx: ProcessContext) -> None:
    rows = list(range(24))[ctx.rank :: 2]
    for data in (
        _cut_by_closure(rows),
        _Slotted(rows),
        ConcatDataset([_cut_by_closure(rows), _cut_by_closure(rows)]),
    ):
        with pytest.raises(DataError, match="already_sharded=True"):
            Accelerator(context=ctx).prepare(DataLoader(data, batch_size=2))
    for equal_data in (_cut_by_closure(list(range(24))), _Slotted(list(range(24)))):
        loader = Accelerator(context=ctx).prepare(DataLoader(equal_data, batch_size=2))
        assert sum(len(batch) for batch in loader) == 12
