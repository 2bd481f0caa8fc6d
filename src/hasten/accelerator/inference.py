"""Inference on all processes: map_dataset() maps a function over a dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import Any, Protocol, TypeVar

from hasten.accelerator.facade import Accelerator
from hasten.comm.agreement import agree
from hasten.trees import to_device

Result = TypeVar("Result")


class Dataset(Sized, Protocol):
    """Sized collection with access by index."""

    def __getitem__(self, index: int, /) -> Any: ...  # Any: the user's items


def map_dataset(
    accelerator: Accelerator,
    function: Callable[[Any], Result],  # Any: items of the dataset
    dataset: Dataset | Sequence[Any],
    description: str = "map",
) -> list[Result]:
    """Return `function(item)` for every item of the dataset, in order, with a progress bar on the main process.

    Process r of n handles items r, r + n, r + 2n, …; tensors in results are moved to the CPU.
    Ranks: every rank, with the same dataset. Raises: on every rank if the function raises on one.
    """
    world = accelerator.ctx.world
    own_indices = range(world.rank, len(dataset), world.size)
    results: list[Any] = []
    with agree(
        world,
        f"mapping {getattr(function, '__name__', 'a function')} over {len(dataset)} items",
    ):
        for index in accelerator.progress(own_indices, desc=description):
            results.append(to_device(function(dataset[index]), "cpu"))
    results_by_rank: list[list[Any]] = world.all_gather_object(results)
    return [
        results_by_rank[index % world.size][index // world.size]
        for index in range(len(dataset))
    ]
