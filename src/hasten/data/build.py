"""Conversion of a user's DataLoader into a prepared loader."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from hasten import trees
from hasten.comm.local import LocalComm
from hasten.config.sections.loop import DataLoaderConfiguration
from hasten.data.batch_plan import ALONE, DataRanks, plan_rows
from hasten.data.dispatch import (
    BatchReader,
    DispatchReader,
    DispatchSource,
    IndexedReader,
    SliceFn,
    StreamReader,
)
from hasten.data.foreign import ForeignSplit, is_hub_stream, plainly
from hasten.data.loader import Loader, LoaderIteration, LoaderParts, MakeMove, Move
from hasten.data.position import Position
from hasten.data.prefetch import LookAhead, Prefetch
from hasten.data.rank_check import LoaderAgreement, agree_on_loader
from hasten.data.sampler import (
    Assignment,
    PlannedSampler,
    assignment_of,
    refuse_full_padding,
)
from hasten.data.source import Ahead, BatchSource, IndexedSource, engine_of, plain_move
from hasten.data.stream import StreamSource
from hasten.data.stream_shard import Cutting, Sharing
from hasten.errors import ConfigError, DataError, PrepareError
from hasten.optim.clock import StepClock
from hasten.runtime.context import ProcessContext
from hasten.runtime.devices import kind_of
from hasten.runtime.logs import get_logger
from hasten.runtime.mesh_plan import BATCH, MeshSpec
from hasten.runtime.seeding import synchronize_rng_states

log = get_logger(__name__)

_DEFAULT_DEPTH: Final = 2
"""Number of batches that are read ahead for an accelerator."""
_ONE_RANK: Final = MeshSpec()


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
    already_sharded: bool | None = None,
) -> Loader:
    """Return a prepared loader that reads this rank's share, on `device` (None leaves batches in host memory).

    `transfer` makes the function that moves batches, if not by a plain copy. `already_sharded` overrides the setting.

    Ranks: every rank, with the same dataset, or one shard of it each, and the same settings.
    Raises: DataError when the ranks' loaders differ; ConfigError or PrepareError when one cannot be split.
    """
    if isinstance(loader, Loader):
        return loader
    _refuse_what_is_lost(loader)
    if config.use_stateful_dataloader:
        log.info(
            "use_stateful_dataloader=True: every prepared loader has state_dict and load_state_dict"
        )
    data_ranks = ALONE if ctx.mesh == _ONE_RANK else _data_ranks(ctx)
    is_declared_sharded = (
        config.already_sharded if already_sharded is None else already_sharded
    )
    agreed = _agreed(
        loader,
        ctx,
        config,
        data_ranks,
        _seed(loader, config, seed),
        is_declared_sharded,
    )
    make = (
        _stream_parts if isinstance(loader.dataset, IterableDataset) else _indexed_parts
    )
    pinned = _pins(loader, device, config)
    reading = engine_of(loader, pin_memory=True) if pinned else loader
    source, total, shown = make(
        _Request(
            reading,
            ctx,
            config,
            data_ranks,
            slice_fn,
            _depth(device, config, transfer),
            device,
            transfer,
            agreed,
        )
    )
    if pinned:
        shown["pin_memory"] = True
    iteration = LoaderIteration(Position(seed=agreed.seed))
    if isinstance(shown.get("batch_sampler"), Assignment):
        shown["batch_sampler"] = PlannedSampler(
            shown["batch_sampler"], loader.sampler, iteration
        )
    loader_parts = LoaderParts(
        source=source,
        clock=clock,
        iteration=iteration,
        move=_move(device, config, transfer),
        shard=data_ranks.shard,
        total_batch_size=total,
        equalise=_equaliser(rng_types, loader, ctx)
        if rng_types and ctx.world.size > 1
        else None,
        draws_as_torch=config.order == "torch",
    )
    if getattr(loader.batch_sampler, "drop_last", loader.drop_last):
        _warn_if_empty(source, data_ranks.num_shards, total)
    return Loader.made(loader, loader_parts, **shown)


def _data_ranks(ctx: ProcessContext) -> DataRanks:
    """Return the shards that this rank and the others read."""
    shards = tuple(ctx.mesh.index(rank, *BATCH) for rank in range(ctx.mesh.world_size))
    return DataRanks(shards[ctx.rank], ctx.mesh.size(*BATCH), shards)


def _agreed(
    loader: DataLoader[Any],
    ctx: ProcessContext,
    config: DataLoaderConfiguration,
    data_ranks: DataRanks,
    seed: int,
    is_declared_sharded: bool | None,
) -> LoaderAgreement:
    """Return the facts that the ranks agree on, after refusing incompatible settings."""
    if ctx.world.size == 1:
        agreed = LoaderAgreement(seed, sharded=False)
    else:
        reads_samples = not (
            config.dispatch_batches and isinstance(loader.dataset, IterableDataset)
        )
        agreed = agree_on_loader(
            loader,
            _facts(loader, config),
            is_declared_sharded,
            seed,
            ctx.world,
            reads_samples,
        )
    if agreed.sharded or is_declared_sharded:
        batched = loader.batch_size is not None or plainly(
            loader.batch_sampler, BatchSampler
        )
        _refuse_settings(bool(config.dispatch_batches), config.split_batches, batched)
    if agreed.split is not None:
        _check_split(
            agreed.split,
            data_ranks.shard,
            data_ranks.num_shards,
            ctx.world.size,
            ctx.rank,
        )
    return agreed


def _check_split(
    split: ForeignSplit, shard: int, num_shards: int, world_size: int, rank: int
) -> None:
    """Raise unless a dataset splits itself as the mesh does."""
    by_rank = (
        (world_size, rank) if split.num_ranks is None else (split.num_ranks, split.rank)
    )
    if by_rank != (num_shards, shard):
        raise DataError(
            f"the dataset is split by {split.by} into {by_rank[0]} parts, of which this is part {by_rank[1]}, and this process "
            f"reads as {shard} of {num_shards} data-parallel ones; samples would be lost or read twice. Split it into "
            f"{num_shards} parts by the data-parallel index, or remove the split: prepare() shards the loader."
        )


def _refuse_settings(dispatch: bool, split: bool, batched: bool) -> None:
    """Raise ConfigError for settings that are incompatible with a loader that is sharded already."""
    if dispatch:
        raise ConfigError(
            "dispatch_batches=True with data that is already sharded: the reading rank would only see its part, and the rest would "
            "never be read. Remove one of the two."
        )
    if split and not batched:
        raise ConfigError(
            "split_batches=True with data that is already sharded and a custom batch sampler: no rank has rows of another rank's "
            "batches. Set split_batches=False, or give the loader a batch_size."
        )


def _warn_if_empty(source: BatchSource, num_shards: int, total: int | None) -> None:
    if source.steps() == 0 and source.size():
        log.warning(
            "drop_last=True leaves no batch: the dataset has %s %s and a step of %d process(es) needs %s; use a smaller "
            "batch_size or drop_last=False",
            source.size(),
            source.unit,
            num_shards,
            total or num_shards,
        )


def _refuse_what_is_lost(loader: DataLoader[Any]) -> None:
    """Raise PrepareError for a loader with settings that a prepared one cannot preserve."""
    if not getattr(loader, "in_order", True):
        raise PrepareError(
            "the loader has in_order=False, so batches arrive in the order in which workers finish, and end of epoch, padding and "
            "position are unknown. Build it with in_order=True."
        )
    if getattr(loader, "next_iter_state", None) is not None:
        raise PrepareError(
            "the StatefulDataLoader has a loaded state for its next iteration, which prepare() would lose. Prepare the loader first, "
            "then load the state_dict() of a prepared loader into it."
        )


def _equaliser(
    kinds: Collection[str], loader: DataLoader[Any], ctx: ProcessContext
) -> Callable[[], None] | None:
    """Return a function that synchronizes these generators; a loader without a generator shuffles equally anyway."""
    types = [
        kind
        for kind in sorted(kinds)
        if kind != "generator" or loader.generator is not None
    ]
    return (
        partial(synchronize_rng_states, types, ctx.world, loader.generator)
        if types
        else None
    )


@dataclass(frozen=True, slots=True)
class _Request:
    """Inputs for building a source."""

    loader: DataLoader[Any]
    ctx: ProcessContext
    config: DataLoaderConfiguration
    data_ranks: DataRanks
    slice_fn: SliceFn | None
    depth: int
    """Number of batches read ahead of the one in use."""
    device: torch.device | None = None
    transfer: MakeMove | None = None
    agreed: LoaderAgreement | None = None

    @property
    def sharded(self) -> bool:
        """True if the loader holds this rank's shard of the data already."""
        return (
            self.agreed is not None
            and self.agreed.sharded
            and self.data_ranks.num_shards > 1
        )


Made = tuple[BatchSource, int | None, dict[str, Any]]
"""The source, the number of samples in a global step if fixed, and attributes that replace the user's."""


def _indexed_parts(request: _Request) -> Made:
    loader, ctx, config, data_ranks = (
        request.loader,
        request.ctx,
        request.config,
        request.data_ranks,
    )
    assignment = assignment_of(loader, ctx, config, data_ranks, request.sharded)
    fixed = assignment.form == "rows"
    shown: dict[str, Any] = (
        {} if assignment.form == "items" else {"batch_sampler": assignment}
    )
    if loader.batch_size is not None:
        shown["batch_size"] = assignment.plan.rows
    total = assignment.plan.global_batch * assignment.stride if fixed else None
    if not config.dispatch_batches:
        if (
            assignment.form == "items"
            and config.split_batches
            and data_ranks.num_shards > 1
        ):
            raise ConfigError(
                "split_batches=True with batch_size=None: the dataset's items are whole batches, and reading each on "
                "every rank to keep a part would waste the rest. Set dispatch_batches=True too, or split_batches=False."
            )
        shard = data_ranks.shard if request.sharded else None
        return (
            IndexedSource(
                loader,
                assignment,
                ctx.topology.rank,
                ahead=_ahead(request.depth, request.device, request.transfer),
                shard=shard,
            ),
            total,
            shown,
        )
    if request.slice_fn is None and not (
        assignment.form == "items" and config.split_batches
    ):
        inner = IndexedSource(
            loader, assignment, ctx.topology.rank, data_ranks.num_shards, ahead="always"
        )
        return _dispatched(inner, IndexedReader(), ctx, data_ranks), total, shown
    inner = IndexedSource(
        loader, assignment_of(loader, ctx, config, ALONE), ctx.rank, ahead="always"
    )
    reader = _batch_reader(request)
    return _dispatched(inner, reader, ctx, data_ranks), total, shown


def _stream_parts(request: _Request) -> Made:
    loader, ctx, config, data_ranks = (
        request.loader,
        request.ctx,
        request.config,
        request.data_ranks,
    )
    cutting, total = _cutting(request)
    shown: dict[str, Any] = (
        {} if loader.batch_size is None else {"batch_size": cutting.rows}
    )
    if config.dispatch_batches:
        reader: DispatchReader = StreamReader()
        # the first rank reads whole batches
        if not cutting.batched or request.slice_fn is not None:
            rows = loader.batch_size or 1
            cutting, reader = (
                replace(cutting, num_shards=1, shard=0, rows=rows, step=None),
                _batch_reader(request),
            )
        else:
            cutting = replace(cutting, every=True)
        inner = StreamSource(loader, cutting, loader.dataset, LocalComm(), ctx.rank)
        return _dispatched(inner, reader, ctx, data_ranks), total, shown
    sharing: Sharing = "given"
    dataset: Any = loader.dataset  # Any: the user's dataset
    if not request.sharded:
        sharing, dataset = _share_stream(loader.dataset, data_ranks)
    # every rank reads each batch and selects its rows
    if config.split_batches and not cutting.batched:
        cutting = replace(
            cutting,
            num_shards=1,
            shard=0,
            split=(data_ranks.num_shards, data_ranks.shard),
        )
        dataset = loader.dataset
    else:
        cutting = replace(cutting, sharing=sharing)
    return (
        StreamSource(loader, cutting, dataset, ctx.groups(*BATCH), ctx.rank),
        total,
        shown,
    )


def _cutting(request: _Request) -> tuple[Cutting, int | None]:
    """Return the cutting of this rank's blocks of a stream, and the number of samples in a global step if fixed."""
    loader, config, data_ranks = request.loader, request.config, request.data_ranks
    drop_last, even = bool(loader.drop_last), config.even_batches
    if loader.batch_size is None:
        refuse_full_padding(
            config, "batch_size=None: the stream's elements are whole batches"
        )
        return Cutting(
            data_ranks.num_shards, data_ranks.shard, 1, False, drop_last, even
        ), None
    plan = plan_rows(
        batch_size=loader.batch_size,
        num_shards=data_ranks.num_shards,
        shard=data_ranks.shard,
        split=config.split_batches,
        dispatch=bool(config.dispatch_batches),
        drop_last=drop_last,
        even=even,
        pad=config.pad,
    )
    total = plan.global_batch
    return Cutting(
        data_ranks.num_shards,
        data_ranks.shard,
        plan.rows,
        True,
        drop_last,
        even,
        pad=config.pad,
        step=total,
    ), total


# Any: the user's dataset
def _share_stream(dataset: Any, data_ranks: DataRanks) -> tuple[Sharing, Any]:
    """Return the way in which this rank gets its share of a stream, and the stream to read."""
    if data_ranks.num_shards == 1:
        return "strided", dataset
    if is_hub_stream(dataset):
        if dataset.num_shards >= data_ranks.num_shards:
            return "own", dataset.shard(
                num_shards=data_ranks.num_shards, index=data_ranks.shard
            )
        log.info(
            "the dataset has %d shard(s) for %d data-parallel processes, so each reads all of it and keeps its part; "
            "%d or more shards would let each read only its own",
            dataset.num_shards,
            data_ranks.num_shards,
            data_ranks.num_shards,
        )
        return "strided", dataset
    return (
        "asked" if callable(getattr(dataset, "shard", None)) else "strided"
    ), dataset


def _dispatched(
    inner: BatchSource,
    reader: DispatchReader,
    ctx: ProcessContext,
    data_ranks: DataRanks,
) -> BatchSource:
    return DispatchSource(inner, reader, ctx.world, data_ranks)


def _batch_reader(request: _Request) -> BatchReader:
    loader, config = request.loader, request.config
    drop_last = bool(
        loader.drop_last or getattr(loader.batch_sampler, "drop_last", False)
    )
    return BatchReader(
        request.data_ranks.num_shards,
        config.split_batches,
        config.even_batches,
        drop_last,
        request.slice_fn,
    )


def _facts(loader: DataLoader[Any], config: DataLoaderConfiguration) -> dict[str, Any]:
    """Return the settings that must be equal on all ranks, by their public names."""
    return {
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


# -- copies to the device -------------------------------------------------------------------------------------------------
def _pins(
    loader: DataLoader[Any],
    device: torch.device | None,
    config: DataLoaderConfiguration,
) -> bool:
    """Return True if `pin_memory` is to be enabled for a loader that leaves it off.

    With workers, torch then receives and pins batches in a separate thread, off the training loop.
    """
    if (
        loader.pin_memory
        or device is None
        or device.type != "cuda"
        or config.dispatch_batches
    ):
        return False
    if config.pin_memory is None and loader.num_workers:
        log.info(
            "pin_memory=True is set for a loader with %d workers, so that a thread receives its batches in parallel with the training "
            "loop; DataLoaderConfiguration(pin_memory=False) turns this off",
            loader.num_workers,
        )
        return True
    return bool(config.pin_memory)


def _depth(
    device: torch.device | None,
    config: DataLoaderConfiguration,
    transfer: MakeMove | None = None,
) -> int:
    """Return the number of batches read ahead of the one in use."""
    if device is None:
        return 0
    if device.type == "cpu":
        return config.prefetch or 0
    depth = _DEFAULT_DEPTH if config.prefetch is None else config.prefetch
    return depth if transfer is not None or kind_of(device).side_streams else 0


def _ahead(depth: int, device: torch.device | None, transfer: MakeMove | None) -> Ahead:
    """Return the read-ahead mode: only large batches are read ahead if a side stream copies them."""
    if not depth:
        return "never"
    always = transfer is not None or device is None or device.type == "cpu"
    return "always" if always else "when large"


def _move(
    device: torch.device | None,
    config: DataLoaderConfiguration,
    transfer: MakeMove | None = None,
) -> Move | None:
    """Return the function that moves batches to the device; None when they are not moved."""
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
        return trees.to_device(
            batch, device, config.non_blocking, config.prefetch_skip_keys
        )

    return plain_move(put)
