"""Loaders made by hand: base_dataloader and gradient_state, ends, arguments, shares of streams, errors of samplers."""

import inspect

import datasets
from torch.utils.data import BatchSampler, DataLoader

from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    SkipDataLoader,
    prepare_data_loader,
)
from accelerate.state import PartialState


class Uncounted:
    def __iter__(self):
        return iter([[0, 1], [2, 3, 4]])

    def __len__(self):
        return 2


def attempt(make):
    try:
        return list(make())
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


def shares(processes, shards):
    rows = datasets.Dataset.from_dict({"x": list(range(12))}).to_iterable_dataset(
        num_shards=shards
    )
    loaders = [
        prepare_data_loader(
            DataLoader(rows, batch_size=2), num_processes=processes, process_index=index
        )
        for index in range(processes)
    ]
    return [
        [type(loader.dataset).__name__, [batch["x"].tolist() for batch in loader]]
        for loader in loaders
    ]


def run() -> object:
    PartialState(cpu=True)
    observations = []
    for kind in (DataLoaderShard, DataLoaderDispatcher, SkipDataLoader):
        loader = kind(list(range(8)), batch_size=2)
        end_flags = [loader.end_of_dataloader for _ in loader]
        observations.append(
            [
                hasattr(kind, "base_dataloader"),
                type(loader.base_dataloader).__name__,
                end_flags,
            ]
        )
        observations.append(
            [
                type(loader.gradient_state).__name__,
                list(inspect.signature(kind).parameters),
            ]
        )
    for batches in (Uncounted(), BatchSampler(range(8), 3, False)):
        observations.append(
            attempt(
                lambda batches=batches: BatchSamplerShard(
                    batches, 2, 0, split_batches=True
                )
            )
        )
        observations.append(
            attempt(lambda batches=batches: BatchSamplerShard(batches, 2, 1))
        )
    return [
        *observations,
        [shares(processes, shards) for processes in (1, 2, 4) for shards in (2, 4)],
    ]


PROCESSES = (1,)
