"""A function over a dataset on all processes: each does its share, everybody gets all results in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import Any, Protocol, TypeVar

from hasten.accelerator.facade import Accelerator
from hasten.comm.agreement import agree
from hasten.trees import to_device

Result = TypeVar("Result")


class Dataset(Sized, Protocol):
    """Items by their position."""

    def __getitem__(self, index: int, /) -> Any: ...  # Any: the user's own items


def map_dataset(
    accelerator: Accelerator,
    function: Callable[[Any], Result],  # Any: the dataset's own items
    dataset: Dataset | Sequence[Any],
    description: str = "map",
) -> list[Result]:
    """`function` of every item of the dataset, in the dataset's order, with a progress bar on the main process.

    Process r of n takes items r, r + n, r + 2n, …; tensors in results come back on the host.
    Ranks: every rank, with the same dataset. Raises: on every rank when the function raises on one.
    """
    world = accelerator.ctx.world
    mine = range(world.rank, len(dataset), world.size)
    results: list[Any] = []
    with agree(world, f"mapping {getattr(function, '__name__', 'a function')} over {len(dataset)} items"):
        for index in accelerator.progress(mine, desc=description):
            results.append(to_device(function(dataset[index]), "cpu"))
    shares: list[list[Any]] = world.all_gather_object(results)
    return [shares[index % world.size][index // world.size] for index in range(len(dataset))]
