"""Reading the first samples of a dataset to compare them between ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, IterableDataset

from hasten.data.batch_plan import derive_seed
from hasten.data.foreign import length_of
from hasten.data.memory import Memory
from hasten.data.random_states import RandomStates, seed_everything
from hasten.data.rank_differences import NUM_SAMPLES, Sample, leaves_of
from hasten.data.source import Forwarding, engine_of
from hasten.runtime.logs import get_logger

log = get_logger(__name__)

# Any in this file: the user's datasets and samples.
NUM_TURNS: Final = 3


def seed_of_turn(seed: int, turn: int) -> int:
    """Return the seed of one reading; the first two readings have equal seeds."""
    return derive_seed(seed, turn == 2)


class HeadOfItems(Forwarding):
    """The first items of a map-style dataset: twice from equal random states, then from different ones."""

    def __init__(self, dataset: Any, count: int, seed: int) -> None:
        self.hasten_dataset = dataset
        self.hasten_count = count
        self.hasten_seed = seed

    def __len__(self) -> int:
        return NUM_TURNS * self.hasten_count

    def __getitem__(self, place: int) -> Any:
        turn, index = divmod(place, self.hasten_count)
        if not index:
            seed_everything(seed_of_turn(self.hasten_seed, turn))
        return turn, self.hasten_dataset[index]


class HeadOfStream(Forwarding, IterableDataset[Any]):
    """The first elements of a stream: twice from equal random states, then from different ones."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.hasten_dataset = dataset
        self.hasten_seed = seed

    def __iter__(self) -> Iterator[Any]:
        for turn in range(NUM_TURNS):
            seed_everything(seed_of_turn(self.hasten_seed, turn))
            yield from ((turn, element) for element in islice(iter(self.hasten_dataset), NUM_SAMPLES))


def leaves_of_turn(read: Any) -> tuple[int, Sample]:
    """Return (turn, leaves) for an element of a head."""
    turn, sample = read
    return turn, leaves_of(sample)


def read_head(loader: DataLoader[Any], seed: int) -> list[list[Sample]] | None:
    """Read the first samples three times, in a worker if the loader has any; None if they cannot be read."""
    dataset: Any = loader.dataset
    size = length_of(dataset) or 0
    streams = isinstance(dataset, IterableDataset)
    if not streams and not size:
        return None
    head: Any = HeadOfStream(dataset, seed) if streams else HeadOfItems(dataset, min(size, NUM_SAMPLES), seed)
    engine = engine_of(
        loader,
        dataset=head,
        batch_size=None,
        batch_sampler=None,
        drop_last=False,
        sampler=count() if streams else range(len(head)),
        collate_fn=leaves_of_turn,
        num_workers=min(loader.num_workers, 1),
        persistent_workers=False,
        pin_memory=False,
    )
    engine.generator = torch.Generator().manual_seed(seed % 2**63)
    memory = Memory(dataset)
    before = memory.capture()
    turns: list[list[Sample]] = [[] for _ in range(NUM_TURNS)]
    try:
        with RandomStates().kept():
            for turn, leaves in engine:
                turns[turn].append(leaves)
    except Exception as error:  # the user's dataset: the training loop raises its error when it reads
        log.info("the first samples could not be compared between ranks: %r", error)
        return None
    finally:
        memory.restore(before)
    return turns
