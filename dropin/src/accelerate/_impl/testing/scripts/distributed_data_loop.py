"""Checks of loaders on two processes: even batches, uneven inputs that are joined, stateful loaders."""

from __future__ import annotations

import os
import pickle
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from accelerate._impl.accelerator.facade import Accelerator
from accelerate._impl.settings.general import DataLoaderConfiguration
from accelerate._impl.views.state import AcceleratorState

# Any in this file: what `prepare` returns, and samples.
NUM_ELEMENTS = 22
NUM_WORKERS = 4
BATCH_SIZE = 4


class DummyIterableDataset(IterableDataset[Any]):
    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Any]:
        yield from self.data


class DummyDataset(Dataset[Any]):
    def __len__(self) -> int:
        return NUM_ELEMENTS

    def __getitem__(self, index: Any) -> Any:
        return {
            "index": index,
            "label": index % 2,
            "random_augmentation": torch.rand(1).item(),
        }


def create_accelerator(even_batches: bool = True) -> Accelerator:
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(even_batches=even_batches)
    )
    assert accelerator.num_processes == 2, (
        f"these checks need two processes, not {accelerator.num_processes}"
    )
    return accelerator


def create_dataloader(
    accelerator: Any,
    dataset_size: int,
    batch_size: int,
    iterable: bool = False,
    shuffle: bool = False,
) -> Any:
    numbers = torch.arange(dataset_size)
    data: Any = DummyIterableDataset(numbers) if iterable else TensorDataset(numbers)
    loader: DataLoader[Any] = DataLoader(
        data, batch_size=batch_size, shuffle=shuffle or None
    )
    return accelerator.prepare(loader)


def verify_dataloader_batch_sizes(
    accelerator: Any,
    dataset_size: int,
    batch_size: int,
    process_0_expected_batch_sizes: list[int],
    process_1_expected_batch_sizes: list[int],
) -> None:
    loader = create_dataloader(accelerator, dataset_size, batch_size)
    batch_sizes = [len(batch[0]) for batch in loader]
    expected = (process_0_expected_batch_sizes, process_1_expected_batch_sizes)[
        accelerator.process_index
    ]
    assert batch_sizes == expected, (
        f"process {accelerator.process_index} has batches of {batch_sizes}, not {expected}"
    )


def test_default_ensures_even_batch_sizes() -> None:
    accelerator = create_accelerator()
    verify_dataloader_batch_sizes(accelerator, 3, 1, [1, 1], [1, 1])
    verify_dataloader_batch_sizes(accelerator, 7, 2, [2, 2], [2, 2])


def test_can_disable_even_batches() -> None:
    accelerator = create_accelerator(even_batches=False)
    verify_dataloader_batch_sizes(accelerator, 3, 1, [1, 1], [1])
    verify_dataloader_batch_sizes(accelerator, 7, 2, [2, 2], [2, 1])


def test_can_join_uneven_inputs() -> None:
    """Check that a process that has run out of batches waits for the others."""
    accelerator = create_accelerator(even_batches=False)
    model = accelerator.prepare(nn.Linear(1, 1))
    loader = create_dataloader(accelerator, 3, 1)
    num_batches = 0
    with accelerator.join_uneven_inputs([model]):
        for batch in loader:
            model(batch[0].float()[:, None]).sum().backward()
            num_batches += 1
    assert num_batches == (2, 1)[accelerator.process_index], num_batches


def test_join_can_override_even_batches() -> None:
    accelerator = create_accelerator()
    model = accelerator.prepare(nn.Linear(1, 1))
    loaders = [create_dataloader(accelerator, 3, 1) for _ in range(2)]
    with accelerator.join_uneven_inputs([model], even_batches=False):
        assert not any(loader.batch_sampler.even_batches for loader in loaders)
    assert all(loader.batch_sampler.even_batches for loader in loaders)


def test_join_can_override_for_mixed_type_dataloaders() -> None:
    accelerator = create_accelerator()
    model = accelerator.prepare(nn.Linear(1, 1))
    create_dataloader(accelerator, 3, 1, iterable=True)
    loader = create_dataloader(accelerator, 3, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with accelerator.join_uneven_inputs([model], even_batches=False):
            assert not loader.batch_sampler.even_batches
    assert loader.batch_sampler.even_batches


def test_join_raises_warning_for_iterable_when_overriding_even_batches() -> None:
    accelerator = create_accelerator()
    model = accelerator.prepare(nn.Linear(1, 1))
    create_dataloader(accelerator, 3, 1, iterable=True)
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        with accelerator.join_uneven_inputs([model], even_batches=False):
            pass
    assert any(
        "only supported for map-style datasets" in str(caught_warning.message)
        for caught_warning in caught_warnings
    ), caught_warnings


def test_pickle_accelerator() -> None:
    accelerator = create_accelerator()
    create_dataloader(accelerator, 32, 4)
    unpickled = pickle.loads(pickle.dumps(accelerator))
    assert unpickled.state.__dict__ == accelerator.state.__dict__


def test_data_loader(data_loader: Any, accelerator: Any) -> None:
    """Check that every row is read and that augmentations differ between processes."""
    row_numbers: list[int] = []
    for batch in data_loader:
        row_numbers += accelerator.gather_for_metrics(batch["index"]).tolist()
    assert sorted(row_numbers) == list(range(NUM_ELEMENTS)), row_numbers


def _resumed_batches(
    accelerator: Any, iterable: bool, folder: str | None = None
) -> None:
    """Check that a loader goes on behind the batch at which its state, or that of everything in a folder, was taken."""
    loader = create_dataloader(accelerator, NUM_ELEMENTS, BATCH_SIZE, iterable=iterable)
    for number, _ in enumerate(loader):
        if number == 0:
            if folder:
                loader_state = accelerator.save_state(folder)
            else:
                loader_state = loader.state_dict()
    everything = _batch_sizes(loader)
    if folder:
        accelerator.load_state(folder)
    else:
        loader = create_dataloader(
            accelerator, NUM_ELEMENTS, BATCH_SIZE, iterable=iterable
        )
        loader.load_state_dict(loader_state)
    assert _batch_sizes(loader) == everything[1:], (
        "the loader did not go on behind its first batch"
    )


def _batch_sizes(loader: Any) -> list[Any]:
    batch_sizes = []
    for batch in loader:
        batch_sizes.append((batch[0] if isinstance(batch, list) else batch).tolist())
    return batch_sizes


def test_stateful_dataloader(accelerator: Any) -> None:
    for iterable in (False, True):
        _resumed_batches(accelerator, iterable)


def test_stateful_dataloader_save_state(accelerator: Any) -> None:
    for iterable in (False, True):
        accelerator.free_memory()
        # another folder on each process
        _resumed_batches(accelerator, iterable, tempfile.mkdtemp())


def main() -> None:
    accelerator = create_accelerator()
    workers = min(NUM_WORKERS, os.cpu_count() or 1)  # torch warns of more
    loader = accelerator.prepare(
        DataLoader(DummyDataset(), batch_size=BATCH_SIZE, num_workers=workers)
    )
    test_data_loader(loader, accelerator)
    checks = (
        test_default_ensures_even_batch_sizes,
        test_can_disable_even_batches,
        test_can_join_uneven_inputs,
    )
    for check in (
        *checks,
        test_join_can_override_even_batches,
        test_join_can_override_for_mixed_type_dataloaders,
    ):
        check()
    test_join_raises_warning_for_iterable_when_overriding_even_batches()
    test_pickle_accelerator()
    AcceleratorState._reset_state()
    stateful = Accelerator(
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)
    )
    test_stateful_dataloader(stateful)
    test_stateful_dataloader_save_state(stateful)
