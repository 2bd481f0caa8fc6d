"""Who reads what: the arithmetic that gives each data-parallel rank its part of an epoch's global order.

An epoch is one global order of *units*: samples, or whole batches when the user's own batch sampler forms them. Every
step takes the next `global_batch` units off that order and cuts them into one contiguous share a rank. The tail, the
last units that do not fill a step, is dropped (`drop_last`), or spread over the ranks as evenly as it goes. With
`even`, shares of the tail are brought to equal size by units from the beginning of the epoch, which come last in the
global order: at most `num_shards - 1` units are ever read twice. With `pad="full"` the tail is cut as a full step is:
the shares that it does not fill are brought to full size by such units, or stay short where the plan is not even.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from hasten.config.data import Pad
from hasten.data.shuffle import Indices
from hasten.errors import ConfigError

How = Literal["shard", "split", "dispatch"]


class Share(NamedTuple):
    """A contiguous piece of the global order; positions past the epoch's size are padding."""

    first: int
    rows: int
    real: int


class Padding(NamedTuple):
    """How many rows of a batch are real, and how many it has; None when only its tensors would tell."""

    real: int
    rows: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPlan:
    """How one rank reads an epoch; equal on all ranks but for `shard`."""

    how: How
    num_shards: int
    shard: int
    global_batch: int
    """Units that all ranks together take in one step."""
    drop_last: bool = False
    even: bool = True
    pad: Pad = "least"

    def __post_init__(self) -> None:
        assert 0 <= self.shard < self.num_shards, f"shard {self.shard} of {self.num_shards}"
        assert self.global_batch > 0, f"a step of {self.global_batch} units"
        assert self.even or self.global_batch >= self.num_shards, f"{self.global_batch} units for {self.num_shards}"
        assert not self.even or self.global_batch % self.num_shards == 0, "an even plan has equal shares"

    @property
    def rows(self) -> int:
        """Units this rank takes in a full step."""
        return self.part(self.global_batch).rows

    @property
    def whole(self) -> int | None:
        """The units that a short step is cut as if it had; None when its own are spread over the ranks."""
        return self.global_batch if self.pad == "full" else None

    @property
    def head(self) -> int:
        """The most units of the beginning of an epoch that its end is padded with."""
        return self.whole or self.num_shards

    def steps(self, size: int, start: int = 0) -> int:
        """How many batches this rank reads from position `start` of an epoch of `size` units."""
        full, tail = divmod(max(size - start, 0), self.global_batch)
        return full + int(self.tail(size, start) is not None if tail else 0)

    def tail(self, size: int, start: int = 0) -> Share | None:
        """This rank's share of the last, short step of the epoch, if it has one."""
        left = max(size - start, 0) % self.global_batch
        if left == 0 or self.drop_last:
            return None
        share = self.part(left, size - left)
        return share if share.rows else None

    def share(self, size: int, step: int, start: int = 0) -> Share:
        """This rank's share of the `step`-th step after position `start`."""
        first = start + step * self.global_batch
        if first + self.global_batch <= size:
            return self.part(self.global_batch, first)
        share = self.tail(size, start)
        assert share is not None, f"step {step} is past the end of {size} units from {start}"
        return share

    def consumed(self, size: int | None, steps: int, start: int = 0) -> int:
        """The position that all ranks have reached together after `steps` steps from `start`."""
        reached = start + steps * self.global_batch
        return reached if size is None else min(reached, max(size, start))

    def assign(self, size: int, start: int = 0, chunk: int = 8192) -> Iterator[Indices]:
        """This rank's positions, step after step, as rows of arrays that hold about `chunk` positions each.

        The last array may be one shorter row: the tail, whose padding wraps to the beginning of the epoch.
        """
        whole = self.part(self.global_batch)
        full = max(size - start, 0) // self.global_batch
        per_chunk = max(chunk // max(whole.rows, 1), 1)
        offsets = start + whole.first + np.arange(whole.rows, dtype=np.int64)
        for first in range(0, full, per_chunk):
            steps = np.arange(first, min(first + per_chunk, full), dtype=np.int64)
            yield steps[:, None] * self.global_batch + offsets
        tail = self.tail(size, start)
        if tail is not None:
            yield (np.arange(tail.first, tail.first + tail.rows, dtype=np.int64) % size)[None, :]

    def part(self, left: int, first: int = 0, shard: int | None = None) -> Share:
        """The share of this rank, or of `shard`, in a step of `left` units that begins at `first`."""
        share = cut(left, self.num_shards, self.shard if shard is None else shard, self.even, self.whole)
        return share._replace(first=first + share.first)


def plan_rows(
    *,
    batch_size: int,
    num_shards: int,
    shard: int,
    split: bool,
    dispatch: bool,
    drop_last: bool,
    even: bool,
    pad: Pad = "least",
) -> LoaderPlan:
    """The plan for a loader with a fixed batch size.

    Raises: ConfigError when a global batch cannot be split over the ranks.
    """
    if split and (batch_size % num_shards if even else batch_size < num_shards):
        smaller = batch_size // num_shards * num_shards
        choices = f"{smaller} or {smaller + num_shards}" if smaller else f"{num_shards}"
        raise ConfigError(
            f"split_batches=True with batch_size={batch_size} over {num_shards} data-parallel processes leaves some "
            f"with fewer samples than others in every step, which biases averaged gradients. Set batch_size to "
            f"{choices}{', or even_batches=False to accept unequal shares' if even and smaller else ''}."
        )
    return LoaderPlan(
        how="dispatch" if dispatch else "split" if split else "shard",
        num_shards=num_shards,
        shard=shard,
        global_batch=batch_size if split else batch_size * num_shards,
        drop_last=drop_last,
        even=even,
        pad=pad,
    )


def plan_batches(
    *, num_shards: int, shard: int, split: bool, dispatch: bool, drop_last: bool, even: bool
) -> LoaderPlan:
    """The plan for a loader whose batches are formed by the user: a unit is a batch."""
    if split:  # every rank takes a part of each batch: as far as batches go, they all read the same
        return LoaderPlan(
            how="dispatch" if dispatch else "split", num_shards=1, shard=0, global_batch=1, drop_last=False, even=even
        )
    return LoaderPlan(
        how="dispatch" if dispatch else "shard",
        num_shards=num_shards,
        shard=shard,
        global_batch=num_shards,
        drop_last=drop_last,
        even=even,
    )


def cut(size: int, num_shards: int, shard: int, even: bool, whole: int | None = None) -> Share:
    """The share of `shard` in `size` units, or where it lies in the `whole` units of a full step.

    An even share may reach past the end, into padding.
    """
    if whole is not None:
        rows = -(-whole // num_shards)
        real = min(max(size - shard * rows, 0), rows)
        return Share(shard * rows, rows if even else real, real)
    if even:
        rows = -(-size // num_shards)
        return Share(shard * rows, rows, min(max(size - shard * rows, 0), rows))
    rows, longer = divmod(size, num_shards)
    mine = rows + (shard < longer)
    return Share(shard * rows + min(shard, longer), mine, mine)
