"""prepare_loader and skip_first_batches: turn a user's DataLoader into a prepared one."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from hasten import trees
from hasten.config.data import DataLoaderConfiguration
from hasten.data.loader import Loader, Move, Parts, Track, plain_move
from hasten.data.order import DistributedOrder, check_distributed, order_of
from hasten.data.plan import plan_batches, plan_rows
from hasten.data.position import Position
from hasten.data.sampler import Assignment, PlannedSampler
from hasten.data.source import IndexedSource
from hasten.errors import PrepareError
from hasten.optim.clock import StepClock
from hasten.runtime.axes import BATCH
from hasten.runtime.context import ProcessContext


def prepare_loader(
    loader: DataLoader[Any],
    *,
    ctx: ProcessContext,
    config: DataLoaderConfiguration,
    clock: StepClock,
    device: torch.device | None,
    seed: int,
    slice_fn: Any = None,
) -> Loader:
    """The loader, reading this rank's share, on `device` (None leaves batches where they are).

    Ranks: every rank, with the same dataset and settings.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise PrepareError("streams are not supported yet")
    assignment = _assignment(loader, ctx, config)
    track = Track(Position(seed=_seed(loader, config, seed)))
    parts = Parts(
        source=IndexedSource(loader, assignment, ctx.rank),
        clock=clock,
        track=track,
        move=_move(device, config),
        shard=ctx.mesh.index(ctx.rank, *BATCH),
        seed_workers=loader.generator is None,
        total_batch_size=assignment.plan.global_batch * assignment.stride if assignment.form == "rows" else None,
    )
    shown: dict[str, Any] = {}
    if assignment.form != "items":
        shown["batch_sampler"] = PlannedSampler(assignment, loader.sampler, track)
    if loader.batch_size is not None:
        shown["batch_size"] = assignment.plan.rows
    return Loader.made(loader, parts, **shown)


def skip_first_batches(loader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """The loader, beginning `num_batches` later in every epoch, every setting kept.

    Counts from the beginning of the epoch: a position loaded before is replaced, not added to.
    """
    if isinstance(loader, Loader):
        return loader.skipping(num_batches)
    raise PrepareError("only prepared loaders can skip yet")


def _seed(loader: DataLoader[Any], config: DataLoaderConfiguration, seed: int) -> int:
    if config.data_seed is not None:
        return config.data_seed
    if isinstance(loader.generator, torch.Generator):
        return loader.generator.initial_seed()
    return seed


def _assignment(loader: DataLoader[Any], ctx: ProcessContext, config: DataLoaderConfiguration) -> Assignment:
    num_shards, shard = ctx.mesh.size(*BATCH), ctx.mesh.index(ctx.rank, *BATCH)
    own = partial(order_of, seekable=config.use_seedable_sampler, comm=ctx.world)
    batches = loader.batch_sampler
    common = {
        "split": config.split_batches,
        "dispatch": bool(config.dispatch_batches),
        "even": config.even_batches,
    }
    if batches is None:  # batch_size=None: the dataset's items are the batches
        plan = plan_batches(num_shards=num_shards, shard=shard, drop_last=False, **common)
        return Assignment(own(loader.sampler), plan, "items")
    if type(batches) is not BatchSampler:
        drop_last = bool(getattr(batches, "drop_last", False))
        plan = plan_batches(num_shards=num_shards, shard=shard, drop_last=drop_last, **common)
        split = (num_shards, shard) if config.split_batches else None
        return Assignment(own(batches), plan, "batches", split)
    order = own(batches.sampler)
    stride = 1
    if isinstance(order, DistributedOrder):
        check_distributed(order.sampler, num_shards, shard)
        stride, num_shards, shard = num_shards, 1, 0
        common["split"] = False
    plan = plan_rows(
        batch_size=batches.batch_size, num_shards=num_shards, shard=shard, drop_last=batches.drop_last, **common
    )
    return Assignment(order, plan, "rows", stride=stride)


def _move(device: torch.device | None, config: DataLoaderConfiguration) -> Move | None:
    if device is None or device.type == "cpu":
        return None

    def put(batch: Any) -> Any:  # Any: a batch of the user's
        return trees.to_device(batch, device, config.non_blocking, config.prefetch_skip_keys)

    return plain_move(put)
