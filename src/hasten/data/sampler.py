"""This rank's batches of indices: an order, cut by a plan, from any position on, as the loader and the settings ask."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from typing import Any, Literal, cast

import numpy as np
from torch.utils.data import BatchSampler, DataLoader

from hasten.comm.local import LocalComm
from hasten.config.sections.loop import DataLoaderConfiguration
from hasten.data.batch_plan import (
    SINGLE_RANK,
    DataRanks,
    Indices,
    LoaderPlan,
    plan_batches,
    plan_rows,
    split_units,
)
from hasten.data.foreign import is_exactly
from hasten.data.order import (
    DistributedOrder,
    PartOrder,
    SampleOrder,
    check_distributed,
    choose_fit,
    choose_order,
)
from hasten.data.position import Part, Position, Unit
from hasten.errors import ConfigError, DataError
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh_plan import BATCH

Form = Literal["rows", "batches", "items"]


IndexBatch = tuple[Any, int | None, bool]
"""One batch of indices for this rank: the indices for the dataset, the number of rows that are not padding (None for
all), and whether it is the rank's last of the epoch. A plain tuple, because one is made for every batch."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Settings that determine the indices this rank reads, and their order."""

    order: SampleOrder
    plan: LoaderPlan
    form: Form
    """Meaning of a unit of the order: one row of a batch, a whole batch, or an item that is not batched at all."""
    split: tuple[int, int] | None = None
    """(number of shares, share) when each batch of the user's batch sampler is split over the ranks."""
    stride: int = 1
    """Number of ranks with separate orders: from the user's DistributedSampler, or data that is sharded already."""
    fill: int | None = None
    """Number of rows that the user's batches of the last step are filled to; None when they are not filled."""

    @property
    def part(self) -> Part | None:
        """The shard of this rank, if the data is sharded already."""
        if isinstance(self.order, PartOrder):
            return self.order.part(self.stride)
        return None

    @property
    def unit(self) -> Unit:
        return "batches" if self.form == "batches" else "samples"

    def steps(self) -> int | None:
        """Return the number of batches of a whole epoch on this rank, if known beforehand."""
        size = self.order.size()
        return None if size is None else self.plan.steps(size)

    def evened(self, even: bool | None) -> Assignment:
        """Return the same assignment with another `even_batches`, when one is given."""
        if even is None:
            return self
        order = self.order
        if isinstance(order, PartOrder):
            order = order.fitted(choose_fit(even, self.plan.drop_last))
        return replace(self, order=order, plan=replace(self.plan, even=even))

    def index_batches(
        self, position: Position, looks_ahead: bool = True
    ) -> Iterator[IndexBatch]:
        """Yield this rank's batches from `position` to the end of its epoch.

        Without `looks_ahead` none is marked as the last, and no unit is drawn before it is needed.

        Raises: DataError when the position cannot be reached with the user's DistributedSampler.
        """
        first_unit, index_at = self._find_start(position)
        if index_at is not None:
            computed_batches = self._compute_batches(index_at, first_unit)
            if isinstance(self.order, PartOrder):
                return self._mark_padding(computed_batches, first_unit)
            return computed_batches
        shards = [self.plan.shard]
        index_batches = (
            round_[0]
            for round_ in self._draw_rounds(
                self.order.draw(position), first_unit, shards, looks_ahead
            )
        )
        if self.split is not None:
            index_batches = (
                None
                if index_batch is None
                else self._share_of(index_batch, self.split[1])
                for index_batch in index_batches
            )
        return (index_batch for index_batch in index_batches if index_batch is not None)

    def batch_of(self, position: Position, step: int) -> list[int] | None:
        """Return the dataset indices of this rank's `step`-th batch from `position`, without padding; None if unknown."""
        size = self.order.size()
        first_unit, index_at = self._find_start(position)
        if index_at is None or size is None:
            return None
        share = self.plan.share(size, step, first_unit)
        num_real = self._num_real(share.real, share.first)
        indices: list[int] = index_at(
            np.arange(share.first, share.first + num_real, dtype=np.int64)
        ).tolist()
        return indices

    def rounds(self, position: Position) -> Iterator[list[IndexBatch | None]]:
        """Yield the batches of all ranks, step by step, for the rank that reads for all; None for ranks without one."""
        first_unit, index_at = self._find_start(position)
        if index_at is not None:
            shards = range(self.plan.num_shards)
            return map(
                list,
                zip_longest(
                    *(
                        self._compute_batches(index_at, first_unit, shard)
                        for shard in shards
                    )
                ),
            )
        rounds = self._draw_rounds(
            self.order.draw(position), first_unit, range(self.plan.num_shards)
        )
        if self.split is None:
            return rounds
        return map(self._shares_of, rounds)

    def _find_start(
        self, position: Position
    ) -> tuple[int, Callable[[Indices], Indices] | None]:
        """Return the first unit to read, and the function from positions to indices; None if units must be drawn."""
        if position.consumed:
            self._check_part(position.part)
        if position.consumed % self.stride:
            raise DataError(
                f"the position of {position.consumed} samples is not a multiple of the {self.stride} ranks that the loader's "
                f"DistributedSampler splits over, so samples would be lost or read twice. Resume on a number of processes "
                f"that divides {position.consumed}, or remove the sampler: prepare() shards the loader."
            )
        index_at = None
        if self.form != "batches":
            index_at = self.order.seek(position)
        return position.consumed // self.stride, index_at

    def _check_part(self, saved: Part | None) -> None:
        """Raise DataError unless a position inside an epoch refers to this rank's shard."""
        current_part = self.part
        if saved == current_part:
            return
        if saved is None or current_part is None or saved[0] != current_part[0]:
            saved_words, current_words = (
                "the whole data"
                if shard_part is None
                else f"one of {shard_part[0]} parts"
                for shard_part in (saved, current_part)
            )
            if saved is None:
                advice = "on the data of the saved run"
            else:
                advice = (
                    f"on {saved[0]} data-parallel processes, with already_sharded=True"
                )
            raise DataError(
                f"the loader's state is inside an epoch of {saved_words}, and this rank reads {current_words}; samples would be lost or "
                f"repeated. Resume {advice}, or start a new epoch."
            )
        raise DataError(
            f"the loader's state is inside an epoch of a part with {saved[1]} {self.unit}, and this rank's part has {current_part[1]}; "
            f"its order is different, so samples would be repeated or lost. Restore the part, or start a new epoch."
        )

    def _mark_padding(
        self, index_batches: Iterator[IndexBatch], num_done: int
    ) -> Iterator[IndexBatch]:
        """Yield the batches of indices of a shard, with units past its end marked as padding."""
        for indices, num_real, is_last in index_batches:
            num_rows = len(indices) if self.form == "rows" else 1
            yield (
                indices,
                self._real_or_none(
                    num_rows if num_real is None else num_real, num_rows, num_done
                ),
                is_last,
            )
            num_done += self.plan.rows

    def _compute_batches(
        self,
        index_at: Callable[[Indices], Indices],
        first_unit: int,
        shard: int | None = None,
    ) -> Iterator[IndexBatch]:
        plan = self.plan if shard is None else replace(self.plan, shard=shard)
        size = self.order.size()
        assert size is not None, "an order that can be computed has a size"
        has_rows = self.form == "rows"
        num_left = max(size - first_unit, 0) // plan.global_batch
        num_real_in_tail = None
        tail_share = plan.tail(size, first_unit)
        if tail_share is not None:
            num_left += 1
            if tail_share.real != tail_share.rows:
                num_real_in_tail = tail_share.real
        for positions in plan.assign(size, first_unit):
            index_rows = index_at(positions.reshape(-1)).reshape(positions.shape)
            for indices in cast(list[list[int]], index_rows.tolist()):
                num_left -= 1
                num_real = None if num_left else num_real_in_tail
                yield (indices if has_rows else indices[0], num_real, num_left == 0)

    def _draw_rounds(
        self,
        units: Iterator[Any],
        start: int,
        shards: Sequence[int],
        looks_ahead: bool = True,
    ) -> Iterator[list[IndexBatch | None]]:
        """Yield batches cut from units that can only be drawn sequentially."""
        plan = self.plan
        first_units = list(islice(units, plan.max_padding))
        units = chain(first_units, units)
        deque(islice(units, start), maxlen=0)
        block = list(islice(units, plan.global_batch))
        num_done = start
        while block:
            reads_next = looks_ahead or (
                self.fill is not None and self._is_short(block, self.fill)
            )
            next_block = self._next_block(units, block) if reads_next else None
            yield [
                self._index_batch(block, next_block, first_units, shard, num_done)
                for shard in shards
            ]
            num_done += plan.rows
            block = self._next_block(units, block) if next_block is None else next_block

    def _next_block(self, units: Iterator[Any], block: list[Any]) -> list[Any]:
        if len(block) == self.plan.global_batch:
            return list(islice(units, self.plan.global_batch))
        return []

    def _index_batch(
        self,
        block: list[Any],
        next_block: list[Any] | None,
        first_units: list[Any],
        shard: int,
        num_done: int,
    ) -> IndexBatch | None:
        plan = self.plan
        fill_rows = self.fill
        if (
            fill_rows
            and plan.even
            and not plan.drop_last
            and next_block == []
            and self._is_short(block, fill_rows)
        ):
            filled_batch = self._fill_rows(fill_rows, block, first_units, shard)
            if self._num_real(1, num_done):
                return filled_batch
            return (filled_batch[0], 0, filled_batch[2])
        own_units, num_real = self._take_share(block, first_units, shard)
        if not own_units:
            return None
        is_last = (
            next_block is not None
            and not self._take_share(next_block, first_units, shard)[0]
        )
        return (
            own_units if self.form == "rows" else own_units[0],
            self._real_or_none(num_real, len(own_units), num_done),
            is_last,
        )

    def _is_short(self, block: list[Any], fill_rows: int) -> bool:
        return len(block) < self.plan.global_batch or len(block[-1]) < fill_rows

    def _fill_rows(
        self, fill_rows: int, block: list[Any], first_units: list[Any], shard: int
    ) -> IndexBatch:
        """Return a rank's share of the last batches together, filled with rows from the start of the epoch."""
        left_rows, first_rows = (
            [row for batch in batches for row in batch]
            for batches in (block, first_units)
        )
        share = split_units(
            len(left_rows),
            self.plan.num_shards,
            shard,
            even=True,
            full_size=fill_rows * self.plan.num_shards,
        )
        own_rows = left_rows[share.first : share.first + fill_rows]
        pad_positions = range(max(share.first, len(left_rows)), share.first + fill_rows)
        own_rows.extend(
            first_rows[(row_index - len(left_rows)) % len(first_rows)]
            for row_index in pad_positions
        )
        return (own_rows, None if share.real == fill_rows else share.real, True)

    def _take_share(
        self, block: list[Any], first_units: list[Any], shard: int
    ) -> tuple[list[Any], int]:
        """Return a rank's share of a block, padded from the start of the epoch, and the number of real units in it."""
        plan = self.plan
        if not block or (len(block) < plan.global_batch and plan.drop_last):
            return [], 0
        share = plan.part(len(block), shard=shard)
        own_units = block[share.first : share.first + share.rows]
        pad_positions = range(max(share.first, len(block)), share.first + share.rows)
        own_units.extend(
            first_units[(unit_index - len(block)) % len(first_units)]
            for unit_index in pad_positions
        )
        return own_units, share.real

    def _real_or_none(self, num_real: int, num_rows: int, num_done: int) -> int | None:
        num_real = self._num_real(num_real, num_done)
        return None if num_real == num_rows else num_real

    def _num_real(self, num_units: int, num_done: int) -> int:
        """Return the number of the `real` units from index `done` of this rank's order on that are not padding."""
        num_own_units = None
        if isinstance(self.order, DistributedOrder | PartOrder):
            num_own_units = self.order.num_real()
        if num_own_units is None:
            return num_units
        return min(max(num_own_units - num_done, 0), num_units)

    def _shares_of(self, round_: list[IndexBatch | None]) -> list[IndexBatch | None]:
        assert self.split is not None, "only split assignments share batches"
        index_batch = round_[0]
        assert index_batch is not None, "a drawn batch is there for everyone"
        return [self._share_of(index_batch, share) for share in range(self.split[0])]

    def _share_of(self, index_batch: IndexBatch, share: int) -> IndexBatch | None:
        assert self.split is not None, "only split assignments share batches"
        num_shares = self.split[0]
        size = len(index_batch[0])
        even = self.plan.even
        full_size = self.fill if size <= (self.fill or 0) else None
        rank_share = split_units(size, num_shares, share, even, full_size)
        if (
            full_size is None
            and not split_units(size, num_shares, num_shares - 1, even).rows
        ):  # raised on every rank, also on those with rows
            raise DataError(
                f"a batch of {size} rows cannot be split over {num_shares} data-parallel processes, so some would have no samples in "
                f"this step. Use batches of at least {num_shares} rows, set even_batches=True, or "
                f"split_batches=False."
            )
        if not rank_share.rows:
            return None
        indices = [
            index_batch[0][row_index % size]
            for row_index in range(rank_share.first, rank_share.first + rank_share.rows)
        ]
        if index_batch[1] is None:
            num_real = rank_share.real
        else:
            num_real = min(max(index_batch[1] - rank_share.first, 0), rank_share.real)
        return (
            indices,
            None if num_real == rank_share.rows else num_real,
            index_batch[2],
        )


def assign_indices(
    loader: DataLoader[Any],
    ctx: ProcessContext,
    config: DataLoaderConfiguration,
    data_ranks: DataRanks,
    sharded: bool = False,
) -> Assignment:
    """Return the indices of this rank; with `sharded`, the sampler already yields this rank's shard only.

    Ranks: every rank. Raises: ConfigError or DataError when the loader cannot be split this way.
    """
    dispatch = bool(config.dispatch_batches)
    split = config.split_batches
    batch_sampler: Any = loader.batch_sampler
    is_plain = is_exactly(batch_sampler, BatchSampler)
    sampler = loader.sampler if batch_sampler is None else batch_sampler
    if is_plain:
        sampler = batch_sampler.sampler
    # the rank that reads for all, and a rank with a separate shard, draw independently
    comm = LocalComm() if dispatch or sharded else ctx.world
    order = choose_order(sampler, seekable=config.use_seedable_sampler, comm=comm)
    stride = 1
    if isinstance(order, DistributedOrder):
        check_distributed(
            order.sampler, data_ranks.num_shards, data_ranks.shard, dispatch
        )
        stride = data_ranks.num_shards
        data_ranks = SINGLE_RANK
        split = False
    elif sharded:
        group = ctx.groups(*BATCH)
        fit = choose_fit(config.even_batches, _drops_last(batch_sampler))
        part_sizes = group.all_gather_object(order.size())
        stride = data_ranks.num_shards
        order = PartOrder(order, group, part_sizes, fit)
        order.size()  # raises on every rank if the parts do not fit together
    if not is_plain:
        return _assign_batches(
            order,
            batch_sampler,
            config,
            SINGLE_RANK if sharded else data_ranks,
            split,
            stride,
        )
    plan = plan_rows(
        batch_size=batch_sampler.batch_size,
        num_shards=data_ranks.num_shards,
        shard=data_ranks.shard,
        split=split,
        drop_last=batch_sampler.drop_last,
        even=config.even_batches,
        pad=config.pad,
    )
    if isinstance(order, PartOrder):  # the rank's rows of each step, all from its shard
        plan = replace(plan, num_shards=1, shard=0, global_batch=plan.rows)
    return Assignment(order, plan, "rows", stride=stride)


def _assign_batches(
    order: SampleOrder,
    batch_sampler: Any,  # Any: the user's batch sampler
    config: DataLoaderConfiguration,
    data_ranks: DataRanks,
    split: bool,
    stride: int,
) -> Assignment:
    """Return the assignment of batches that the user formed: by a batch sampler, or as items of the dataset."""
    fill_rows = None
    if config.pad == "full":
        fill_rows = getattr(batch_sampler, "batch_size", None)
    if fill_rows is None:
        items_text = "batch_size=None: the dataset's items are whole batches"
        if batch_sampler is None:
            description = items_text
        else:
            description = (
                f"{type(batch_sampler).__name__}, a batch sampler without batch_size"
            )
        refuse_full_padding(config, description)
    plan = plan_batches(
        num_shards=data_ranks.num_shards,
        shard=data_ranks.shard,
        split=split,
        drop_last=_drops_last(batch_sampler),
        even=config.even_batches,
    )
    shares = None
    if split and batch_sampler is not None:
        shares = (data_ranks.num_shards, data_ranks.shard)
    return Assignment(
        order,
        plan,
        "items" if batch_sampler is None else "batches",
        shares,
        stride,
        fill_rows,
    )


def _drops_last(batch_sampler: Any) -> bool:  # Any: the user's batch sampler
    return bool(getattr(batch_sampler, "drop_last", False))


def refuse_full_padding(config: DataLoaderConfiguration, description: str) -> None:
    """Raise ConfigError for pad="full" where the number of rows of a full batch is unknown."""
    if config.pad == "full":
        raise ConfigError(
            f'pad="full" with {description}, so the size of a full batch is unknown. Give the batch sampler a batch_size, or the loader one, or set pad="least".'
        )


class PlannedSampler(BatchSampler):
    """The batch sampler that a prepared loader shows: this rank's batches of the coming epoch."""

    def __init__(self, assignment: Assignment, sampler: Any, position: Any) -> None:
        # Any: the user's sampler, and the loader's iteration, of which only `upcoming()` is used
        self.assignment = assignment
        self.sampler = sampler
        self.batch_size = assignment.plan.rows
        self.drop_last = assignment.plan.drop_last
        self._position = position

    def __iter__(self) -> Iterator[list[Any]]:
        position = replace(self._position.upcoming(), consumed=0)
        for index_batch in self.assignment.index_batches(position):
            yield index_batch[0]

    def __len__(self) -> int:
        steps = self.assignment.steps()
        if steps is None:
            raise TypeError(
                "the number of batches is unknown: the loader's sampler has no length"
            )
        return steps

    def set_epoch(self, epoch: int) -> None:
        """Start at `epoch` when iterated next."""
        self._position.set_epoch(epoch)
