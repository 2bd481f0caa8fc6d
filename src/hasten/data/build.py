"""prepare_loader: turn a user's DataLoader into a prepared one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from hasten import trees
from hasten.comm.local import LocalComm
from hasten.config.data import DataLoaderConfiguration
from hasten.data.agreement import agree_on_loader
from hasten.data.dispatch import DispatchSource, Reader, Seats
from hasten.data.foreign import has_fixed_shard_order, is_hub_stream, length_of, plainly
from hasten.data.iterable import Cutting, Sharing
from hasten.data.loader import Loader, MakeMove, Move, Parts, Track, plain_move
from hasten.data.memory import Memory
from hasten.data.order import DistributedOrder, check_distributed, order_of
from hasten.data.plan import plan_batches, plan_rows
from hasten.data.position import Position
from hasten.data.prefetch import LookAhead, Prefetch
from hasten.data.readers import BatchReader, IndexedReader, SliceFn, StreamReader
from hasten.data.sampler import Assignment, PlannedSampler
from hasten.data.source import Ahead, IndexedSource, Source, engine_of
from hasten.data.stream import StreamSource
from hasten.errors import ConfigError, DataError, PrepareError
from hasten.optim.clock import StepClock
from hasten.runtime.axes import BATCH
from hasten.runtime.context import ProcessContext
from hasten.runtime.devices import kind_of
from hasten.runtime.logs import get_logger
from hasten.runtime.seeding import synchronize_rng_states

log = get_logger(__name__)

_DEFAULT_DEPTH = 2


def prepare_loader(
    loader: DataLoader[Any],
    *,
    ctx: ProcessContext,
    config: DataLoaderConfiguration,
    clock: StepClock,
    device: torch.device | None,
    seed: int,
    slice_fn: SliceFn | None = None,
    rng_types: Collection[str] = (),
    transfer: MakeMove | None = None,
) -> Loader:
    """The loader, reading this rank's share, on `device` (None leaves batches where they are).

    `transfer` makes what brings batches there, where a copy would not do.

    Ranks: every rank, with the same dataset and settings.
    Raises: DataError when the ranks' loaders differ; ConfigError or PrepareError when one cannot be split.
    """
    if isinstance(loader, Loader):
        return loader
    _refuse_what_is_lost(loader)
    if config.use_stateful_dataloader:
        log.info("use_stateful_dataloader=True: every prepared loader has state_dict and load_state_dict by itself")
    seed = agree_on_loader(_facts(loader, config), _seed(loader, config, seed), ctx.world)
    seats = Seats(
        ctx.mesh.index(ctx.rank, *BATCH),
        ctx.mesh.size(*BATCH),
        tuple(ctx.mesh.index(rank, *BATCH) for rank in range(ctx.mesh.world_size)),
    )
    make = _stream_parts if isinstance(loader.dataset, IterableDataset) else _indexed_parts
    pinned = _pins(loader, device, config)
    reading = engine_of(loader, pin_memory=True) if pinned else loader
    source, total, shown = make(
        _Request(reading, ctx, config, seats, slice_fn, _depth(device, config, transfer), device, transfer)
    )
    if pinned:
        shown["pin_memory"] = True
    track = Track(Position(seed=seed))
    if isinstance(shown.get("batch_sampler"), Assignment):
        shown["batch_sampler"] = PlannedSampler(shown["batch_sampler"], loader.sampler, track)
    parts = Parts(
        source=source,
        clock=clock,
        track=track,
        move=_move(device, config, transfer),
        shard=seats.shard,
        total_batch_size=total,
        equalise=_equaliser(rng_types, loader, ctx),
        draws_as_torch=config.order == "torch",
    )
    made = Loader.made(loader, parts, **shown)
    if source.steps() == 0 and source.size():
        log.warning(
            "drop_last=True leaves no batch: the dataset has %s %s and a step of %d process(es) needs %s; use a smaller "
            "batch_size or drop_last=False",
            source.size(),
            source.unit,
            seats.num_shards,
            total or seats.num_shards,
        )
    return made


def _refuse_what_is_lost(loader: DataLoader[Any]) -> None:
    """Raise for a loader with something that a prepared one could not keep."""
    if not getattr(loader, "in_order", True):
        raise PrepareError(
            "the loader has in_order=False, so batches come in the order workers finish, and neither the end of the "
            "epoch, padding nor a position to resume from can be known. Build it with in_order=True."
        )
    if getattr(loader, "next_iter_state", None) is not None:
        raise PrepareError(
            "the StatefulDataLoader has a state loaded that its next iteration would begin from, and prepare() would "
            "lose it. Prepare the loader first, then load the state_dict() of a prepared loader into it."
        )


def _equaliser(kinds: Collection[str], loader: DataLoader[Any], ctx: ProcessContext) -> Callable[[], None] | None:
    """What makes these generators equal; a loader without one of its own shuffles alike on all ranks anyway."""
    types = [kind for kind in sorted(kinds) if kind != "generator" or loader.generator is not None]
    if not types or ctx.world.size == 1:
        return None
    return partial(synchronize_rng_states, types, ctx.world, loader.generator)


@dataclass(frozen=True, slots=True)
class _Request:
    """What a source is made for."""

    loader: DataLoader[Any]
    ctx: ProcessContext
    config: DataLoaderConfiguration
    seats: Seats
    slice_fn: SliceFn | None
    depth: int
    """Batches read ahead of the one in use."""
    device: torch.device | None = None
    transfer: MakeMove | None = None


Made = tuple[Source, int | None, dict[str, Any]]
"""The source, samples in a global step when fixed, and attributes to show instead of the user's."""


def _indexed_parts(request: _Request) -> Made:
    loader, ctx, config, seats = request.loader, request.ctx, request.config, request.seats
    whole = _assignment(loader, ctx, config, seats)
    fixed = whole.form == "rows"
    shown: dict[str, Any] = {} if whole.form == "items" else {"batch_sampler": whole}
    if loader.batch_size is not None:
        shown["batch_size"] = whole.plan.rows
    total = whole.plan.global_batch * whole.stride if fixed else None
    if not config.dispatch_batches:
        if whole.form == "items" and config.split_batches and seats.num_shards > 1:
            raise ConfigError(
                "split_batches=True with batch_size=None: the dataset's items are whole batches, and reading each on "
                "every rank to keep a part would waste the rest. Set dispatch_batches=True too, or split_batches=False."
            )
        return IndexedSource(loader, whole, ctx.rank, ahead=_ahead(request)), total, shown
    if request.slice_fn is None and not (whole.form == "items" and config.split_batches):
        inner = IndexedSource(loader, whole, ctx.rank, seats.num_shards, ahead="always")
        return _dispatched(inner, IndexedReader(), ctx, seats), total, shown
    alone = Seats(0, 1, (0,))
    inner = IndexedSource(loader, _assignment(loader, ctx, config, alone), ctx.rank, ahead="always")
    reader = _batch_reader(request)
    return _dispatched(inner, reader, ctx, seats), total, shown


def _stream_parts(request: _Request) -> Made:
    loader, ctx, config, seats = request.loader, request.ctx, request.config, request.seats
    _draw_alike(loader.dataset, ctx)
    batch_size = loader.batch_size
    split = config.split_batches
    rows = 1 if batch_size is None else batch_size
    drop_last = bool(loader.drop_last)
    if batch_size is not None:
        plan = plan_rows(
            batch_size=batch_size,
            num_shards=seats.num_shards,
            shard=seats.shard,
            split=split,
            dispatch=bool(config.dispatch_batches),
            drop_last=drop_last,
            even=config.even_batches,
            pad=config.pad,
        )
        rows = plan.rows
        total: int | None = plan.global_batch
    else:
        total = None
        _refuse_full_padding(config, "batch_size=None: the stream's elements are whole batches")
    shown: dict[str, Any] = {} if batch_size is None else {"batch_size": rows}
    batched = batch_size is not None
    if config.dispatch_batches and batched and request.slice_fn is None:
        cutting = Cutting(
            seats.num_shards,
            seats.shard,
            rows,
            True,
            drop_last,
            config.even_batches,
            pad=config.pad,
            step=total,
            every=True,
        )
        inner = StreamSource(loader, cutting, loader.dataset, LocalComm(), ctx.rank)
        return _dispatched(inner, StreamReader(), ctx, seats), total, shown
    if config.dispatch_batches:
        cutting = Cutting(1, 0, batch_size or 1, batched, drop_last, config.even_batches, pad=config.pad)
        inner = StreamSource(loader, cutting, loader.dataset, LocalComm(), ctx.rank)
        return _dispatched(inner, _batch_reader(request), ctx, seats), total, shown
    sharing, dataset = _share_stream(loader.dataset, seats)
    if split and not batched:  # every rank reads each batch and keeps its rows
        cutting = Cutting(1, 0, 1, False, drop_last, config.even_batches, split=(seats.num_shards, seats.shard))
        dataset = loader.dataset
    else:
        cutting = Cutting(
            seats.num_shards,
            seats.shard,
            rows,
            batched,
            drop_last,
            config.even_batches,
            sharing,
            pad=config.pad,
            step=total,
        )
    return StreamSource(loader, cutting, dataset, ctx.groups(*BATCH), ctx.rank), total, shown


def _share_stream(dataset: Any, seats: Seats) -> tuple[Sharing, Any]:  # Any: the user's dataset
    """How this rank gets its part of a stream, and the stream to read."""
    if seats.num_shards == 1:
        return "strided", dataset
    if is_hub_stream(dataset):
        if dataset.num_shards >= seats.num_shards:
            return "own", dataset.shard(num_shards=seats.num_shards, index=seats.shard)
        log.info(
            "the dataset has %d shard(s) for %d data-parallel processes, so each reads all of it and keeps its part; "
            "%d or more shards would let each read only its own",
            dataset.num_shards,
            seats.num_shards,
            seats.num_shards,
        )
        return "strided", dataset
    return ("asked" if callable(getattr(dataset, "shard", None)) else "strided"), dataset


def _dispatched(inner: Source, reader: Reader, ctx: ProcessContext, seats: Seats) -> Source:
    return DispatchSource(inner, reader, ctx.world, seats)


def _batch_reader(request: _Request) -> BatchReader:
    loader, config = request.loader, request.config
    drop_last = bool(loader.drop_last or getattr(loader.batch_sampler, "drop_last", False))
    return BatchReader(request.seats.num_shards, config.split_batches, config.even_batches, drop_last, request.slice_fn)


def _draw_alike(dataset: Any, ctx: ProcessContext) -> None:  # Any: the user's dataset
    """Give the generators a stream owns the states they have on the first rank, as ranks that share it must draw alike.

    Ranks: every rank.
    """
    if ctx.world.size == 1:
        return
    memory = Memory(dataset, attributes=False)
    mine = memory.capture()
    everyone = ctx.world.all_gather_object(mine)
    if has_fixed_shard_order(dataset) and any(other != mine for other in everyone):
        raise DataError(
            f"the stream's {dataset.num_shards} shards are shuffled without a seed, so every rank has them in another "
            f"order and samples would be lost or read twice. Give shuffle() a seed."
        )
    memory.restore(everyone[0])


def _facts(loader: DataLoader[Any], config: DataLoaderConfiguration) -> dict[str, Any]:
    """What must be equal on all ranks, by the name a user knows it."""
    return {
        "the dataset's length": "unknown" if (length := length_of(loader.dataset)) is None else length,
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        "the kind of sampler": type(loader.sampler).__name__,
        "dispatch_batches": config.dispatch_batches,
        "split_batches": config.split_batches,
        "even_batches": config.even_batches,
        "pad": config.pad,
        "order": config.order,
    }


def _seed(loader: DataLoader[Any], config: DataLoaderConfiguration, seed: int) -> int:
    if config.data_seed is not None:
        return config.data_seed
    if isinstance(loader.generator, torch.Generator):
        return loader.generator.initial_seed()
    return seed


def _assignment(
    loader: DataLoader[Any], ctx: ProcessContext, config: DataLoaderConfiguration, seats: Seats
) -> Assignment:
    num_shards, shard = seats.num_shards, seats.shard
    comm = LocalComm() if config.dispatch_batches else ctx.world  # the rank that reads draws for itself
    seekable, as_torch = config.use_seedable_sampler, config.order == "torch"
    split, dispatch, even = config.split_batches, bool(config.dispatch_batches), config.even_batches
    batches = loader.batch_sampler
    if batches is None:  # batch_size=None: the dataset's items are the batches
        _refuse_full_padding(config, "batch_size=None: the dataset's items are whole batches")
        plan = plan_batches(
            num_shards=num_shards, shard=shard, split=split, dispatch=dispatch, drop_last=False, even=even
        )
        return Assignment(order_of(loader.sampler, seekable=seekable, comm=comm, as_torch=as_torch), plan, "items")
    if not plainly(batches, BatchSampler):
        drop_last = bool(getattr(batches, "drop_last", False))
        plan = plan_batches(
            num_shards=num_shards, shard=shard, split=split, dispatch=dispatch, drop_last=drop_last, even=even
        )
        shares = (num_shards, shard) if split else None
        fill = getattr(batches, "batch_size", None) if config.pad == "full" else None
        if fill is None:
            _refuse_full_padding(config, f"{type(batches).__name__}, a batch sampler without batch_size")
        order = order_of(batches, seekable=seekable, comm=comm, as_torch=as_torch)
        return Assignment(order, plan, "batches", shares, fill=fill)
    order = order_of(batches.sampler, seekable=seekable, comm=comm, as_torch=as_torch)
    stride = 1
    if isinstance(order, DistributedOrder):
        check_distributed(order.sampler, num_shards, shard, dispatch)
        stride, num_shards, shard, split = num_shards, 1, 0, False
    plan = plan_rows(
        batch_size=batches.batch_size,
        num_shards=num_shards,
        shard=shard,
        split=split,
        dispatch=dispatch,
        drop_last=batches.drop_last,
        even=even,
        pad=config.pad,
    )
    return Assignment(order, plan, "rows", stride=stride)


def _refuse_full_padding(config: DataLoaderConfiguration, what: str) -> None:
    """Raise for pad="full" where the rows of a full batch are not known."""
    if config.pad == "full":
        raise ConfigError(
            f'pad="full" with {what}, so the rows that the last batches should be filled to are not known, and they would '
            f'stay short. Give the batch sampler a batch_size, or the loader one, or set pad="least".'
        )


def _pins(loader: DataLoader[Any], device: torch.device | None, config: DataLoaderConfiguration) -> bool:
    """Whether `pin_memory` is switched on for a loader that leaves it off.

    With workers, torch then receives and pins batches in a thread of its own, which takes that off the training loop.
    """
    if loader.pin_memory or device is None or device.type != "cuda" or config.dispatch_batches:
        return False
    if config.pin_memory is None and loader.num_workers:
        log.info(
            "pin_memory=True is set for a loader with %d workers, so that a thread receives its batches beside the "
            "training loop; DataLoaderConfiguration(pin_memory=False) leaves the loader as it is",
            loader.num_workers,
        )
        return True
    return bool(config.pin_memory)


def _depth(device: torch.device | None, config: DataLoaderConfiguration, transfer: MakeMove | None = None) -> int:
    """How many batches are read ahead of the one in use."""
    if device is None:
        return 0
    if device.type == "cpu":
        return config.prefetch or 0
    depth = _DEFAULT_DEPTH if config.prefetch is None else config.prefetch
    return depth if transfer is not None or kind_of(device).side_streams else 0


def _ahead(request: _Request) -> Ahead:
    """Whether batches are read before they are asked for: only large ones where a side stream copies them."""
    if not request.depth:
        return "never"
    always = request.transfer is not None or request.device is None or request.device.type == "cpu"
    return "always" if always else "when large"


def _move(
    device: torch.device | None, config: DataLoaderConfiguration, transfer: MakeMove | None = None
) -> Move | None:
    """What brings batches to the device, or None when they stay."""
    if device is None:
        return None
    depth = _depth(device, config, transfer)
    if transfer is not None:
        return transfer(depth, config.prefetch_skip_keys or ())
    if device.type == "cpu":
        return LookAhead(depth) if depth else None
    if depth:
        return Prefetch(device, depth, config.prefetch_skip_keys)

    def put(batch: Any) -> Any:  # Any: a batch of the user's
        return trees.to_device(batch, device, config.non_blocking, config.prefetch_skip_keys)

    return plain_move(put)
