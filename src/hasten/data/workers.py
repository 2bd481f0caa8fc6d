"""What runs in a DataLoader's worker processes around the user's map-style dataset: seeds a batch, names a failing index."""

from __future__ import annotations

from typing import Any

from hasten.data.reader_rng import seed_everything
from hasten.data.shuffle import derive_seed

# Any in this file: indices, samples and attributes are the user's own objects.


class Forwarding:
    """Stands in for the user's dataset: what is not its own, it reads from and writes to that dataset.

    So `get_worker_info().dataset` serves a worker_init_fn as the dataset itself would. Its own names begin with
    `hasten_`, to be out of the way.
    """

    hasten_dataset: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "hasten_")):
            raise AttributeError(name)
        return getattr(self.hasten_dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("hasten_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self.hasten_dataset, name, value)


Picked = tuple[list[Any], int]
"""A batch of indices, and the seed its samples are drawn under. A plain tuple: one is pickled for every batch."""


class WorkerDataset(Forwarding):
    """The user's dataset in a worker. Each batch begins from random states that depend on its place in the epoch.

    So a resumed run augments its batches as the uninterrupted one would have, whatever workers did before.
    """

    def __init__(self, dataset: Any) -> None:
        self.hasten_dataset = dataset

    def __len__(self) -> int:
        return len(self.hasten_dataset)

    def __getitems__(self, picked: Picked) -> Any:
        indices, seed = picked
        seed_everything(seed)
        fetch = getattr(self.hasten_dataset, "__getitems__", None)
        return fetch(indices) if fetch else [_sample(self.hasten_dataset, index) for index in indices]

    def __getitem__(self, picked: Picked) -> Any:
        (index,), seed = picked
        seed_everything(seed)
        return _sample(self.hasten_dataset, index)


def _sample(dataset: Any, index: Any) -> Any:
    try:
        return dataset[index]
    except Exception as error:  # the user's dataset: any type, raised on as it is
        error.add_note(f"hasten: raised by the dataset at index {index!r}.")
        raise


def seed_of_batch(seed: int, epoch: int, shard: int, number: int) -> int:
    """The seed of batch `number` of an epoch on one rank."""
    return derive_seed(seed, epoch, shard, number, 2)
