"""The recognisers of other packages' classes, against the packages themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import datasets
import pytest
import torch.utils.data
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader import sampler as stateful_samplers

from hasten.data.foreign import (
    detach_epoch_counter,
    is_exactly,
    is_hub_stream,
    is_torchdata,
    restart_stream,
    state_loses_samples,
)


def base_stream(size: int = 24, shards: int = 3) -> datasets.IterableDataset:
    return datasets.Dataset.from_dict({"x": list(range(size))}).to_iterable_dataset(
        num_shards=shards
    )


def shifted_base() -> datasets.IterableDataset:
    return base_stream(12, 2).map(lambda row: {"x": row["x"] + 100})


PIPELINES: dict[str, Callable[[], Any]] = {  # Any: streams of `datasets`
    "plain": base_stream,
    "shuffle": lambda: base_stream().shuffle(seed=1, buffer_size=8),
    "shuffle of one": lambda: base_stream().shuffle(seed=1, buffer_size=1),
    "shuffle, then map": lambda: (
        base_stream().shuffle(seed=1, buffer_size=8).map(lambda row: row)
    ),
    "shuffle, then much": lambda: (
        base_stream()
        .shuffle(seed=1, buffer_size=8)
        .map(lambda r: r)
        .filter(lambda r: True)
        .batch(2)
    ),
    "map": lambda: base_stream().map(lambda row: row),
    "map in batches": lambda: base_stream().map(
        lambda rows: rows, batched=True, batch_size=5
    ),
    "filter": lambda: base_stream().filter(lambda row: row["x"] % 3),
    "skip and take": lambda: base_stream().skip(2).take(18),
    "batch": lambda: base_stream().batch(3),
    "repeat": lambda: base_stream().repeat(2),
    "interleave": lambda: datasets.interleave_datasets([base_stream(), shifted_base()]),
    "interleave at random": lambda: datasets.interleave_datasets(
        [base_stream(), shifted_base()], probabilities=[0.5, 0.5], seed=3
    ),
    "interleave shuffled": lambda: datasets.interleave_datasets(
        [base_stream().shuffle(seed=3, buffer_size=6), shifted_base()]
    ),
    "concatenate": lambda: datasets.concatenate_datasets(
        [base_stream(), shifted_base()]
    ),
    "concatenate shuffled": lambda: datasets.concatenate_datasets(
        [shifted_base(), base_stream().shuffle(seed=2, buffer_size=4)]
    ),
    "torch format": lambda: base_stream().with_format("torch"),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_state_that_loses_samples_is_known_beforehand(name: str) -> None:
    build = PIPELINES[name]
    all_rows = [str(row) for row in build()]
    exact = True
    for stop in range(1, len(all_rows), 2):
        stream = build()
        elements = iter(stream)
        for _ in range(stop):
            next(elements)
        resumed = build()
        resumed.load_state_dict(stream.state_dict())
        exact = exact and [str(row) for row in resumed] == all_rows[stop:]
    assert state_loses_samples(build()) is not exact
    assert is_hub_stream(build())


class Wrapper(IterableDataset[Any]):
    """A dataset of the user's around a stream."""

    def __init__(self, inner: Any) -> None:
        self.streams = [inner]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.streams[0])


def test_a_buffer_inside_a_dataset_of_the_users_is_found() -> None:
    assert state_loses_samples(Wrapper(base_stream().shuffle(seed=1, buffer_size=8)))
    assert not state_loses_samples(Wrapper(base_stream()))
    assert not is_hub_stream(Wrapper(base_stream()))


def test_a_stream_begins_anew_after_a_state_was_loaded() -> None:
    stream = base_stream()
    elements = iter(stream)
    for _ in range(5):
        next(elements)
    stream.load_state_dict(stream.state_dict())
    assert next(iter(stream)) == {"x": 5}
    restart_stream(stream, 0)
    assert [row["x"] for row in stream] == list(range(24))


class Wrapped:
    def __init__(self, stream: datasets.IterableDataset) -> None:
        self.stream = stream


@pytest.mark.parametrize("wrap", [lambda stream: stream, Wrapped])
def test_the_copies_of_a_stream_in_workers_count_epochs_apart(
    wrap: Callable[[datasets.IterableDataset], Any],
) -> None:
    stream = base_stream().shuffle(seed=1, buffer_size=5)
    twin = datasets.IterableDataset.__new__(datasets.IterableDataset)
    # as in a worker: another object, the same shared memory
    twin.__dict__.update(stream.__dict__)
    twin.set_epoch(1)
    assert stream.epoch == 1, "datasets shares the counter between workers"
    detach_epoch_counter(wrap(twin))
    twin.set_epoch(2)
    assert (stream.epoch, twin.epoch) == (1, 2)


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated:UserWarning")
def test_torchdata_classes_stand_for_those_of_torch() -> None:
    data = list(range(4))
    loader: Any = StatefulDataLoader(data, batch_size=2, shuffle=True)
    assert is_torchdata(loader)
    assert is_exactly(loader.batch_sampler, BatchSampler)
    assert is_exactly(loader.sampler, RandomSampler)
    assert is_exactly(stateful_samplers.RandomSampler(data), RandomSampler)
    assert not is_torchdata(DataLoader(data))  # type: ignore[arg-type]
    assert is_exactly(torch.utils.data.SequentialSampler(data), SequentialSampler)
    assert not is_exactly(type("Mine", (RandomSampler,), {})(data), RandomSampler)
