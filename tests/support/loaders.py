"""Prepared loaders of any rank of any world in one process, for laws about the samples each rank reads."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hasten.comm.local import LocalComm
from hasten.config.sections.loop import DataLoaderConfiguration
from hasten.data.build import prepare_loader
from hasten.data.loader import Loader
from hasten.optim.clock import StepClock
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh_plan import MeshSpec
from hasten.runtime.topology import Topology

# Any in this file: batches and collate functions of the caller.


class SeenBatches(NamedTuple):
    """One batch as seen by a user."""

    values: list[Any]
    real: int
    last: bool


def on_every_rank(
    ctx: ProcessContext, batches: list[SeenBatches]
) -> list[list[SeenBatches]]:
    """Return what every rank has seen. Ranks: every rank."""
    gathered = ctx.world.all_gather_object([tuple(batch) for batch in batches])
    return [
        [SeenBatches(*batch) for batch in rank_batches] for rank_batches in gathered
    ]


class CountingStream(IterableDataset[int]):
    """Iterable dataset of `range(size)` that splits itself over DataLoader workers, as torch's documentation recommends."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epochs: list[int] = []

    def __iter__(self) -> Any:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self.size, step))

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def context_of(
    rank: int = 0, world: int = 1, mesh: MeshSpec | None = None
) -> ProcessContext:
    """Return the context of one rank that is alone in its process, without communication."""
    topology = Topology(
        rank=rank, world_size=world, local_rank=rank, local_world_size=world
    )
    comm = LocalComm()
    return ProcessContext(
        topology,
        mesh or MeshSpec.flat(world),
        torch.device("cpu"),
        comm,
        lambda *axes: comm,
    )


def prepared(
    loader: DataLoader[Any],
    rank: int = 0,
    world: int = 1,
    *,
    clock: StepClock | None = None,
    mesh: MeshSpec | None = None,
    ctx: ProcessContext | None = None,
    seed: int = 7,
    **settings: Any,
) -> Loader:
    """Return the loader prepared for one rank with the given fields of DataLoaderConfiguration."""
    context = ctx or context_of(rank, world, mesh)
    config = DataLoaderConfiguration(**settings)
    device = torch.device("cpu")
    clock = clock or StepClock()
    return prepare_loader(
        loader,
        ctx=context,
        config=config,
        clock=clock,
        device=device,
        seed=seed,
    )


def seen(loader: Loader, limit: int | None = None) -> list[SeenBatches]:
    """Return the batches of one pass, or of its first `limit` steps, as seen by a user."""
    out: list[SeenBatches] = []
    for batch in loader:
        values = batch.tolist() if isinstance(batch, torch.Tensor) else list(batch)
        real = len(values) if loader.cursor.num_real is None else loader.cursor.num_real
        assert loader.cursor.num_rows in (None, len(values)), (
            "the cursor knows the rows it says are padded"
        )
        out.append(SeenBatches(values, real, loader.cursor.at_end))
        if limit is not None and len(out) == limit:
            break
    return out


def global_order(shares: list[list[SeenBatches]]) -> list[Any]:
    """Return the real rows of all ranks in the global order: step by step, rank by rank."""
    order: list[Any] = []
    for step in range(max(map(len, shares), default=0)):
        for share in shares:
            if step < len(share):
                order += share[step].values[: share[step].real]
    return order
