"""Conversion of a user's DataLoader into a prepared loader."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from hasten import trees
from hasten.comm.local import LocalComm
from hasten.config.sections.loop import DataLoaderConfiguration
from hasten.data.batch_plan import SINGLE_RANK, DataRanks, plan_rows
from hasten.data.dispatch import DispatchSource, IndexedReader, StreamReader
from hasten.data.foreign import ForeignSplit, is_exactly, is_hub_stream
from hasten.data.loader import Loader, LoaderIteration, LoaderParts, MakeMove, Move
from hasten.data.position import Position
from hasten.data.prefetch import LookAhead, Prefetch
from hasten.data.rank_check import LoaderAgreement, agree_on_loader
from hasten.data.sampler import (
    PlannedSampler,
    assign_indices,
    refuse_full_padding,
)
from hasten.data.source import (
    Ahead,
    BatchSource,
    IndexedSource,
    copy_loader,
    move_on_request,
)
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
    if config.use_stateful_dataloader:
        log.info(
            "use_stateful_dataloader=True: every prepared loader has state_dict and load_state_dict"
        )
    if already_sharded is None:
        already_sharded = config.already_sharded
    data_ranks = SINGLE_RANK if ctx.mesh == _ONE_RANK else _find_data_ranks(ctx)
    agreement = _agree_with_ranks(
        loader, ctx, config, data_ranks, seed, already_sharded
    )
    is_sharded = agreement.sharded and data_ranks.num_shards > 1
    is_pinned = _needs_pinning(loader, device, config)
    engine = copy_loader(loader, pin_memory=True) if is_pinned else loader
    iteration = LoaderIteration(Position(seed=agreement.seed))
    shown_attributes: dict[str, Any] = {"pin_memory": True} if is_pinned else {}
    move, ahead = _choose_move(device, config, transfer)
    source: BatchSource
    if isinstance(loader.dataset, IterableDataset):
        cutting = _plan_cutting(engine, config, data_ranks)
        source = _stream_source(engine, ctx, config, data_ranks, cutting, is_sharded)
        batch_size = cutting.rows
        global_batch_size = cutting.step
    else:
        assignment = assign_indices(engine, ctx, config, data_ranks, is_sharded)
        batch_size = assignment.plan.rows
        global_batch_size = None
        if assignment.form == "rows":
            global_batch_size = assignment.plan.global_batch * assignment.stride
        if assignment.form != "items":
            planned_sampler = PlannedSampler(assignment, loader.sampler, iteration)
            shown_attributes["batch_sampler"] = planned_sampler
        shard = data_ranks.shard if is_sharded else None
        source = IndexedSource(
            engine, assignment, ctx.topology.rank, ahead=ahead, shard=shard
        )
        if config.dispatch_batches:
            num_shards = data_ranks.num_shards
            reading_source = IndexedSource(
                engine, assignment, ctx.topology.rank, num_shards, "always"
            )
            source = DispatchSource(
                reading_source, IndexedReader(), ctx.world, data_ranks
            )
    if loader.batch_size is not None:
        shown_attributes["batch_size"] = batch_size
    loader_parts = LoaderParts(
        source=source,
        clock=clock,
        iteration=iteration,
        move=move,
        shard=data_ranks.shard,
        total_batch_size=global_batch_size,
        equalise=_make_equaliser(rng_types, loader, ctx)
        if ctx.world.size > 1
        else None,
    )
    if getattr(loader.batch_sampler, "drop_last", loader.drop_last):
        _warn_if_empty(source, data_ranks.num_shards, global_batch_size)
    prepared = Loader.__new__(Loader)
    prepared.__dict__.update(loader.__dict__)
    prepared.__dict__.update(_iterator=None, parts=loader_parts, **shown_attributes)
    return prepared


def _find_data_ranks(ctx: ProcessContext) -> DataRanks:
    """Return the shards that this rank and the others read."""
    shards = tuple(ctx.mesh.index(rank, *BATCH) for rank in range(ctx.mesh.world_size))
    return DataRanks(shards[ctx.rank], ctx.mesh.size(*BATCH), shards)


def _agree_with_ranks(
    loader: DataLoader[Any],
    ctx: ProcessContext,
    config: DataLoaderConfiguration,
    data_ranks: DataRanks,
    seed: int,
    already_sharded: bool | None,
) -> LoaderAgreement:
    """Return the facts that the ranks agree on, after refusing settings that are incompatible or would be lost."""
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
    if config.data_seed is not None:
        seed = config.data_seed
    elif isinstance(loader.generator, torch.Generator):
        seed = loader.generator.initial_seed()
    is_stream = isinstance(loader.dataset, IterableDataset)
    agreement = LoaderAgreement(seed, sharded=False)
    if ctx.world.size > 1:
        compared_settings = {
            "batch_size": loader.batch_size,
            "drop_last": loader.drop_last,
            "the kind of sampler": type(loader.sampler).__name__,
            "dispatch_batches": config.dispatch_batches,
            "split_batches": config.split_batches,
            "even_batches": config.even_batches,
            "pad": config.pad,
        }
        reads_samples = not (config.dispatch_batches and is_stream)
        agreement = agree_on_loader(
            loader, compared_settings, already_sharded, seed, ctx.world, reads_samples
        )
    is_sharded = agreement.sharded or bool(already_sharded)
    if is_sharded and config.dispatch_batches:
        raise ConfigError(
            "dispatch_batches=True with data that is already sharded: the reading rank would only see its part, and the rest would "
            "never be read. Remove one of the two."
        )
    is_split = is_sharded and config.split_batches
    if is_split and not is_exactly(loader.batch_sampler, BatchSampler):
        raise ConfigError(
            "split_batches=True with data that is already sharded and a custom batch sampler: no rank has rows of another rank's "
            "batches. Set split_batches=False, or give the loader a batch_size."
        )
    if config.split_batches and loader.batch_sampler is None:
        raise ConfigError(
            "split_batches=True with batch_size=None: the dataset's items are whole batches, and reading each on every rank to keep "
            "a part would waste the rest. Set split_batches=False, or give the loader a batch_size."
        )
    if agreement.split is not None:
        _check_split(agreement.split, data_ranks, ctx)
    return agreement


def _check_split(
    split: ForeignSplit, data_ranks: DataRanks, ctx: ProcessContext
) -> None:
    """Raise unless a dataset splits itself as the mesh does."""
    num_shards = data_ranks.num_shards
    shard = data_ranks.shard
    by_rank = (split.num_ranks, split.rank)
    if split.num_ranks is None:
        by_rank = (ctx.world.size, ctx.rank)
    if by_rank != (num_shards, shard):
        raise DataError(
            f"the dataset is split by {split.by} into {by_rank[0]} parts, of which this is part {by_rank[1]}, and this process "
            f"reads as {shard} of {num_shards} data-parallel ones; samples would be lost or read twice. Split it into "
            f"{num_shards} parts by the data-parallel index, or remove the split: prepare() shards the loader."
        )


def _warn_if_empty(
    source: BatchSource, num_shards: int, global_batch_size: int | None
) -> None:
    if source.steps() == 0 and source.size():
        log.warning(
            "drop_last=True leaves no batch: the dataset has %s %s and a step of %d process(es) needs %s; use a smaller "
            "batch_size or drop_last=False",
            source.size(),
            source.unit,
            num_shards,
            global_batch_size or num_shards,
        )


def _make_equaliser(
    rng_types: Collection[str], loader: DataLoader[Any], ctx: ProcessContext
) -> Callable[[], None] | None:
    """Return a function that synchronizes these generators; a loader without a generator shuffles equally anyway."""
    generator_types = set(rng_types)
    if loader.generator is None:
        generator_types.discard("generator")
    if not generator_types:
        return None
    return partial(
        synchronize_rng_states, sorted(generator_types), ctx.world, loader.generator
    )


def _stream_source(
    loader: DataLoader[Any],
    ctx: ProcessContext,
    config: DataLoaderConfiguration,
    data_ranks: DataRanks,
    cutting: Cutting,
    is_sharded: bool,
) -> BatchSource:
    if config.dispatch_batches:
        cutting = replace(cutting, every=True)
        inner = StreamSource(loader, cutting, loader.dataset, LocalComm(), ctx.rank)
        return DispatchSource(inner, StreamReader(), ctx.world, data_ranks)
    sharing: Sharing = "given"
    dataset: Any = loader.dataset  # Any: the user's dataset
    if not is_sharded:
        sharing, dataset = _share_stream(loader.dataset, data_ranks)
    cutting = replace(cutting, sharing=sharing)
    group = ctx.groups(*BATCH)
    return StreamSource(loader, cutting, dataset, group, ctx.rank)


def _plan_cutting(
    loader: DataLoader[Any], config: DataLoaderConfiguration, data_ranks: DataRanks
) -> Cutting:
    """Return the cutting of this rank's blocks of a stream."""
    num_shards = data_ranks.num_shards
    shard = data_ranks.shard
    drop_last = bool(loader.drop_last)
    even_batches = config.even_batches
    if loader.batch_size is None:
        refuse_full_padding(
            config, "batch_size=None: the stream's elements are whole batches"
        )
        return Cutting(num_shards, shard, 1, False, drop_last, even_batches)
    plan = plan_rows(
        batch_size=loader.batch_size,
        num_shards=num_shards,
        shard=shard,
        split=config.split_batches,
        drop_last=drop_last,
        even=even_batches,
        pad=config.pad,
    )
    global_batch = plan.global_batch
    return Cutting(
        num_shards,
        shard,
        plan.rows,
        True,
        drop_last,
        even_batches,
        pad=config.pad,
        step=global_batch,
    )


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


# -- copies to the device -------------------------------------------------------------------------------------------------
def _needs_pinning(
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


def _choose_move(
    device: torch.device | None,
    config: DataLoaderConfiguration,
    transfer: MakeMove | None = None,
) -> tuple[Move | None, Ahead]:
    """Return the function that moves batches to the device, None if none does, and the batches that are read ahead of it."""
    if device is None:
        return None, "never"
    if device.type == "cpu":
        depth = config.prefetch or 0
    elif transfer is not None or kind_of(device).side_streams:
        depth = _DEFAULT_DEPTH if config.prefetch is None else config.prefetch
    else:
        depth = 0
    if transfer is not None:
        move = transfer(depth, config.prefetch_skip_keys or ())
        return move, "always" if depth else "never"
    if device.type == "cpu":
        return (LookAhead(depth), "always") if depth else (None, "never")
    if depth:
        # a side stream copies; only large batches are worth it
        return Prefetch(device, depth, config.prefetch_skip_keys), "when large"

    def put(batch: Any) -> Any:  # Any: a batch of the user's
        return trees.to_device(
            batch, device, config.non_blocking, config.prefetch_skip_keys
        )

    return move_on_request(put), "never"
