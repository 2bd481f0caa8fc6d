"""The assignment of indices to ranks that a user's samplers and settings stand for."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from hasten.comm.local import LocalComm
from hasten.config.data import DataLoaderConfiguration
from hasten.data.dispatch import Seats
from hasten.data.foreign import plainly
from hasten.data.order import DistributedOrder, Order, check_distributed, order_of
from hasten.data.parts import PartOrder, empty_part, fit_of
from hasten.data.plan import plan_batches, plan_rows
from hasten.data.sampler import Assignment
from hasten.errors import ConfigError
from hasten.runtime.axes import BATCH
from hasten.runtime.context import ProcessContext


def assignment_of(
    loader: DataLoader[Any],
    ctx: ProcessContext,
    config: DataLoaderConfiguration,
    seats: Seats,
    sharded: bool = False,
    checks: bool = False,
) -> Assignment:
    """The indices of this rank; with `sharded`, the sampler's own are this rank's part already.

    With `checks`, ranks compare the samplers that are drawn on the first of them.

    Ranks: every rank. Raises: ConfigError or DataError when the loader cannot be split like that.
    """
    dispatch, even = bool(config.dispatch_batches), config.even_batches
    batches = loader.batch_sampler
    rows = plainly(batches, BatchSampler)
    sampler: Any = batches.sampler if rows else loader.sampler if batches is None else batches
    # the rank that reads for all, and one that has a part of its own, draw for themselves
    comm = LocalComm() if dispatch or sharded else ctx.world
    drop_last = bool(getattr(batches, "drop_last", False))
    order = order_of(
        sampler, seekable=config.use_seedable_sampler, comm=comm, as_torch=config.order == "torch", checks=checks
    )
    num_shards, shard, split, stride = seats.num_shards, seats.shard, config.split_batches, 1
    if isinstance(order, DistributedOrder):
        check_distributed(order.sampler, num_shards, shard, dispatch)
        stride, num_shards, shard, split = num_shards, 1, 0, False
    elif sharded:
        order = _part(order, ctx, even, drop_last)
        stride = num_shards
    if not plainly(batches, BatchSampler):
        form, fill = "items" if batches is None else "batches", None
        if batches is None:  # batch_size=None
            refuse_full_padding(config, "batch_size=None: the dataset's items are whole batches")
        elif config.pad == "full" and (fill := getattr(batches, "batch_size", None)) is None:
            refuse_full_padding(config, f"{type(batches).__name__}, a batch sampler without batch_size")
        alone = (1, 0) if sharded else (num_shards, shard)
        plan = plan_batches(
            num_shards=alone[0], shard=alone[1], split=split, dispatch=dispatch, drop_last=drop_last, even=even
        )
        shares = (num_shards, shard) if split and batches is not None else None
        return Assignment(order, plan, "items" if form == "items" else "batches", shares, stride, fill)
    batch_size = batches.batch_size
    if sharded and stride > 1 and num_shards > 1:  # a rank's rows of each step, all of its own part
        batch_size = plan_rows(
            batch_size=batch_size,
            num_shards=num_shards,
            shard=shard,
            split=split,
            dispatch=False,
            drop_last=drop_last,
            even=even,
        ).rows
        num_shards, shard, split = 1, 0, False
    plan = plan_rows(
        batch_size=batch_size,
        num_shards=num_shards,
        shard=shard,
        split=split,
        dispatch=dispatch,
        drop_last=drop_last,
        even=even,
        pad=config.pad,
    )
    return Assignment(order, plan, "rows", stride=stride)


def _part(order: Order, ctx: ProcessContext, even: bool, drop_last: bool) -> PartOrder:
    """The order of this rank's part, with the sizes of all parts.

    Raises: DataError on every rank when a part is empty that others would wait for.
    """
    group = ctx.groups(*BATCH)
    sizes: list[int | None] = group.all_gather_object(order.size())
    fit = fit_of(even, drop_last)
    empty = [group.ranks[member] for member, size in enumerate(sizes) if size == 0]
    if fit == "longest" and 0 < len(empty) < len(sizes):
        raise empty_part(empty, len(sizes))
    return PartOrder(order, group, sizes, fit)


def refuse_full_padding(config: DataLoaderConfiguration, what: str) -> None:
    """Raise for pad="full" where the rows of a full batch are not known."""
    if config.pad == "full":
        raise ConfigError(
            f'pad="full" with {what}, so the rows that the last batches should be filled to are not known, and they would '
            f'stay short. Give the batch sampler a batch_size, or the loader one, or set pad="least".'
        )
