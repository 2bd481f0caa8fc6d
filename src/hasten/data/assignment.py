"""Assignment of dataset indices to ranks, derived from the user's samplers and settings."""

from __future__ import annotations

from typing import Any, Final

from torch.utils.data import BatchSampler, DataLoader

from hasten.comm.local import LocalComm
from hasten.config.sections.loop import DataLoaderConfiguration
from hasten.data.batch_plan import LoaderPlan, plan_batches, plan_rows
from hasten.data.dispatch import DataRanks
from hasten.data.foreign import plainly
from hasten.data.order import DistributedOrder, SampleOrder, check_distributed, order_of
from hasten.data.sampler import Assignment
from hasten.data.sharded_order import PartOrder, empty_part, fit_of
from hasten.errors import ConfigError
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh_plan import BATCH

ALONE: Final = DataRanks(0, 1, (0,))
"""DataRanks of a rank whose order is independent of other ranks."""


def assignment_of(
    loader: DataLoader[Any],
    ctx: ProcessContext,
    config: DataLoaderConfiguration,
    seats: DataRanks,
    sharded: bool = False,
    checks: bool = False,
) -> Assignment:
    """Return the indices of this rank; with `sharded`, the sampler already yields this rank's shard only.

    With `checks`, ranks compare the samplers that are drawn from on the first rank.

    Ranks: every rank. Raises: ConfigError or DataError when the loader cannot be split this way.
    """
    dispatch, split = bool(config.dispatch_batches), config.split_batches
    batches = loader.batch_sampler
    sampler: Any = loader.sampler if batches is None else batches
    if plainly(batches, BatchSampler):
        sampler = batches.sampler
    # the rank that reads for all, and a rank with a separate shard, draw independently
    comm = LocalComm() if dispatch or sharded else ctx.world
    seekable, as_torch = config.use_seedable_sampler, config.order == "torch"
    order = order_of(sampler, seekable=seekable, comm=comm, as_torch=as_torch, checks=checks)
    stride = 1
    if isinstance(order, DistributedOrder):
        check_distributed(order.sampler, seats.num_shards, seats.shard, dispatch)
        stride, seats, split = seats.num_shards, ALONE, False
    elif sharded:
        stride, order = seats.num_shards, _part(order, ctx, config.even_batches, _drops_last(batches))
    if not plainly(batches, BatchSampler):
        return _whole_batches(order, batches, config, ALONE if sharded else seats, split, stride)
    batch_size = batches.batch_size
    if isinstance(order, PartOrder):  # the rank's rows of each step, all from its shard
        batch_size, seats, split = _plan(batch_size, batches, config, seats, split).rows, ALONE, False
    return Assignment(order, _plan(batch_size, batches, config, seats, split), "rows", stride=stride)


def _plan(
    batch_size: int, batches: BatchSampler, config: DataLoaderConfiguration, seats: DataRanks, split: bool
) -> LoaderPlan:
    return plan_rows(
        batch_size=batch_size,
        num_shards=seats.num_shards,
        shard=seats.shard,
        split=split,
        dispatch=bool(config.dispatch_batches),
        drop_last=batches.drop_last,
        even=config.even_batches,
        pad=config.pad,
    )


def _whole_batches(
    order: SampleOrder,
    batches: Any,  # Any: the user's batch sampler
    config: DataLoaderConfiguration,
    seats: DataRanks,
    split: bool,
    stride: int,
) -> Assignment:
    """Return the assignment of batches that the user formed: by a batch sampler, or as items of the dataset."""
    fill = getattr(batches, "batch_size", None) if config.pad == "full" else None
    if fill is None:
        items = "batch_size=None: the dataset's items are whole batches"
        what = items if batches is None else f"{type(batches).__name__}, a batch sampler without batch_size"
        refuse_full_padding(config, what)
    plan = plan_batches(
        num_shards=seats.num_shards,
        shard=seats.shard,
        split=split,
        dispatch=bool(config.dispatch_batches),
        drop_last=_drops_last(batches),
        even=config.even_batches,
    )
    shares = (seats.num_shards, seats.shard) if split and batches is not None else None
    return Assignment(order, plan, "items" if batches is None else "batches", shares, stride, fill)


def _drops_last(batches: Any) -> bool:  # Any: the user's batch sampler
    return bool(getattr(batches, "drop_last", False))


def _part(order: SampleOrder, ctx: ProcessContext, even: bool, drop_last: bool) -> PartOrder:
    """Return the order of this rank's shard, with the sizes of all shards.

    Raises: DataError on every rank when a shard is empty while others are not.
    """
    group = ctx.groups(*BATCH)
    sizes: list[int | None] = group.all_gather_object(order.size())
    fit = fit_of(even, drop_last)
    empty = [group.ranks[member] for member, size in enumerate(sizes) if size == 0]
    if fit == "longest" and 0 < len(empty) < len(sizes):
        raise empty_part(empty, len(sizes))
    return PartOrder(order, group, sizes, fit)


def refuse_full_padding(config: DataLoaderConfiguration, what: str) -> None:
    """Raise ConfigError for pad="full" where the number of rows of a full batch is unknown."""
    if config.pad == "full":
        raise ConfigError(
            f'pad="full" with {what}, so the size of a full batch is unknown. Give the batch sampler a batch_size, or the loader one, or set pad="least".'
        )
