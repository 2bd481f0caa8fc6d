"""Streams that shuffle through a buffer, end unevenly or draw random numbers resume as if never stopped, on any ranks."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hasten.data.loader import Loader
from hasten.errors import DataError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from tests.support.loaders import prepared

PRELOAD: Final = ("datasets",)

# Any in this file: streams and batches of many kinds.
Row = tuple[list[Any], int | None, bool, float]


def taken(loader: Loader, limit: int | None = None) -> list[Row]:
    """The batches of one pass, their padding and end, and what the training draws beside them."""
    out = []
    for batch in loader:
        values = batch["x"] if isinstance(batch, dict) else batch
        drawn = random.random() + float(np.random.rand()) + float(torch.rand(()))
        out.append(
            (values.tolist(), loader.cursor.num_real, loader.cursor.at_end, drawn)
        )
        if len(out) == limit:
            break
    return out


def after_every_stop(
    ctx: ProcessContext, data: Callable[[], Any], batch: int | None, **settings: Any
) -> int:
    """Stop after every batch of an epoch and go on in a new loader: it must be the rest of the uninterrupted epoch."""

    options = {
        name: settings.pop(name)
        for name in ("collate_fn", "num_workers", "multiprocessing_context")
        if name in settings
    }

    def fresh(seed: int = 7) -> Loader:
        return prepared(
            DataLoader(data(), batch_size=batch, **options),
            ctx=ctx,
            seed=seed,
            **settings,
        )

    def training_begins() -> None:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(20 + ctx.rank)

    training_begins()
    uninterrupted = taken(fresh())
    for stop in range(1, len(uninterrupted) + 1):
        first = fresh()
        training_begins()
        assert taken(first, stop) == uninterrupted[:stop]
        state = json.loads(json.dumps(first.state_dict()))
        second = fresh(seed=99)
        second.load_state_dict(state)
        assert taken(second) == uninterrupted[stop:], (
            f"rank {ctx.rank}, stopped after {stop}"
        )
        assert second.state_dict()["epoch"] == 1
    return len(uninterrupted)


def buffered(size: int, shards: int, seed: int | None = 3, buffer: int = 8) -> Any:
    data = datasets.Dataset.from_dict({"x": list(range(size))}).to_iterable_dataset(
        num_shards=shards
    )
    return data.shuffle(seed=seed, buffer_size=buffer)


def fork(num_workers: int) -> dict[str, Any]:
    return (
        {"num_workers": num_workers, "multiprocessing_context": "fork"}
        if num_workers
        else {}
    )


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [(24, 23), pytest.param((48, 47), marks=pytest.mark.exhaustive)],
    ids=["short", "long"],
)
@ranks(2, exhaustive=(1, 3, 4))
def test_shuffle_buffers_lose_and_repeat_nothing(
    ctx: ProcessContext, dispatch: bool, sizes: tuple[int, int]
) -> None:
    for size, shards in zip(sizes, (1, 4), strict=True):
        count = after_every_stop(
            ctx, partial(buffered, size, shards), 4, dispatch_batches=dispatch
        )
        assert count >= size // (4 * ctx.world.size)


@ranks(2, timeout_s=110, exhaustive=(1,))
@pytest.mark.exhaustive
def test_shuffle_buffers_in_workers(ctx: ProcessContext) -> None:
    after_every_stop(ctx, partial(buffered, 23, 4), 3, **fork(2))


def unseeded(shards: int) -> DataLoader[Any]:
    return DataLoader(buffered(48, shards, seed=None), batch_size=4)


@ranks(1, 2, exhaustive=(3,))
def test_a_shuffle_without_a_seed_is_the_same_on_all_ranks_and_after_a_resume(
    ctx: ProcessContext,
) -> None:
    loader = prepared(unseeded(1), ctx=ctx)
    first = taken(loader, 2)
    state = loader.state_dict()
    second = prepared(unseeded(1), ctx=ctx)
    second.load_state_dict(state)
    rows = [row for batch in first + taken(second) for row in batch[0][: batch[1]]]
    assert sorted(itertools.chain(*ctx.world.all_gather_object(rows))) == list(
        range(48)
    )


@ranks(1, 2)
def test_shards_shuffled_without_a_seed_are_refused_where_their_order_would_matter(
    ctx: ProcessContext,
) -> None:
    if ctx.world.size > 1:
        with pytest.raises(DataError, match="shuffle\\(\\) a seed"):
            prepared(unseeded(4), ctx=ctx)
        return
    loader = prepared(unseeded(4), ctx=ctx)
    taken(loader, 2)
    second = prepared(unseeded(4), ctx=ctx)
    second.load_state_dict(loader.state_dict())
    with pytest.raises(DataError, match="shuffle\\(\\) the seed"):
        taken(second)


class Cut(IterableDataset[int]):
    """Gives every part another number of elements."""

    def __init__(
        self, elements: list[int], num_shards: int = 1, shard_index: int = 0
    ) -> None:
        self.elements, self.parts, self.part = elements, num_shards, shard_index

    def shard(self, num_shards: int, index: int) -> Cut:
        return Cut(self.elements, num_shards, index)

    def __iter__(self) -> Iterator[int]:
        first = sum(range(1, self.part + 1)) * 3
        return iter(self.elements[first : first + 3 * (self.part + 1)])


@ranks(2, exhaustive=(3, 4))
def test_ranks_that_run_out_early_pad_with_the_epochs_first_batch(
    ctx: ProcessContext,
) -> None:
    elements = list(range(100, 200))
    count = after_every_stop(ctx, partial(Cut, elements), 2)
    assert count == -(-3 * ctx.world.size // 2), (
        "as many steps as the longest rank needs"
    )


@pytest.mark.parametrize("size", [9, 13, 14])
@ranks(2, exhaustive=(3,))
def test_dispatched_streams_pad_with_the_epochs_first_batch(
    ctx: ProcessContext, size: int
) -> None:
    for batch in (2, None):
        after_every_stop(
            ctx,
            partial(Drawing, size),
            batch,
            collate_fn=torch.as_tensor,
            dispatch_batches=True,
        )


class Drawing(IterableDataset[float]):
    """Elements that are drawn from all three libraries."""

    def __init__(self, size: int, has_generator: bool = False) -> None:
        self.size = size
        self.rng = np.random.default_rng(8) if has_generator else None

    def __iter__(self) -> Iterator[float]:
        for _ in range(self.size):
            generator_draw = float(self.rng.random()) if self.rng is not None else 0.0
            yield (
                random.random()
                + float(np.random.randn())
                + float(torch.rand(()))
                + generator_draw
            )


def noisy(samples: list[float]) -> torch.Tensor:
    return (
        torch.tensor(samples, dtype=torch.float64)
        + torch.rand((), dtype=torch.float64)
        + random.random()
    )


@pytest.mark.parametrize("prefetch", [0, 2])
@ranks(1, 2)
def test_reading_ahead_and_skipping_leave_the_training_random_states_alone(
    ctx: ProcessContext, prefetch: int
) -> None:
    for has_generator in (False, True):
        after_every_stop(
            ctx,
            partial(Drawing, 17, has_generator),
            3,
            collate_fn=noisy,
            prefetch=prefetch,
        )


@ranks(2, timeout_s=110, exhaustive=(1,))
def test_lasting_workers_resume_in_their_second_epoch(ctx: ProcessContext) -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(
            Drawing(8, has_generator=True),
            batch_size=2,
            collate_fn=noisy,
            persistent_workers=True,
            **fork(2),
        )

    uninterrupted = prepared(build(), ctx=ctx)
    epochs = [taken(uninterrupted), taken(uninterrupted)]
    for stop in (0, 2):  # between the epochs, and inside the second
        first = prepared(build(), ctx=ctx)
        taken(first)
        if stop:
            taken(first, stop)
        second = prepared(build(), ctx=ctx)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [row[:3] for row in taken(second)] == [
            row[:3] for row in epochs[1][stop:]
        ]


class Stateful(IterableDataset[int]):
    """Shuffles through a buffer, and has a state that forgets it, as one that passes on its source's state would."""

    def __init__(self, size: int) -> None:
        self.size, self.read = size, 0

    def __iter__(self) -> Iterator[int]:
        buffer: list[int] = []
        while self.read < self.size:
            buffer.append(self.read)
            self.read += 1
            if len(buffer) > 4:
                yield buffer.pop(random.randrange(len(buffer)))
        self.read = 0
        yield from buffer

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


@ranks(1, 2)
def test_a_state_of_a_stream_that_draws_is_not_trusted(ctx: ProcessContext) -> None:
    after_every_stop(ctx, partial(Stateful, 19), 2)


class Counting(Stateful):
    """Reads in order, and begins anew after its end, as its state then says."""

    def __iter__(self) -> Iterator[int]:
        while self.read < self.size:
            self.read += 1
            yield self.read - 1
        self.read = 0


@ranks(2, exhaustive=(1, 3))
def test_a_state_taken_after_the_end_does_not_begin_the_epoch_anew(
    ctx: ProcessContext,
) -> None:
    for size in (19, 20, 24):
        after_every_stop(ctx, partial(Counting, size), 2)


class OwnGenerator(IterableDataset[int]):
    """Draws its order from a generator that lives as long as its worker."""

    def __init__(self, size: int) -> None:
        self.size, self.rng = size, np.random.default_rng(4)

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from self.rng.permutation(np.arange(first, self.size, step)).tolist()


@ranks(1, 3)
def test_a_worker_that_gave_nothing_yet_goes_on_from_what_it_remembered(
    ctx: ProcessContext,
) -> None:
    """In the second epoch, between the first worker's first batch and the second worker's."""

    def build() -> DataLoader[Any]:
        return DataLoader(
            OwnGenerator(28), batch_size=2, persistent_workers=True, **fork(2)
        )

    for broken_off in (None, 2):
        loader = prepared(build(), ctx=ctx)
        taken(loader, broken_off)
        second = [row[:3] for row in taken(loader)]
        first = prepared(build(), ctx=ctx)
        taken(first, broken_off)
        taken(first, 1)
        resumed = prepared(build(), ctx=ctx)
        resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
        # how far a worker reads ahead of a break is a matter of its speed
        if broken_off is None:
            assert [row[:3] for row in taken(resumed)] == second[1:]
        for open_loader in (loader, first, resumed):
            open_loader.parts.source.engine.__dict__["_iterator"] = (
                None  # ends its workers
            )
