"""Which dataset indices a batch of a saved loader holds: from the loader's state in a checkpoint, as numbers without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hasten.data.plan import LoaderPlan
from hasten.data.shuffle import Shuffle
from hasten.errors import DataError


@dataclass(frozen=True, slots=True)
class Found:
    """A batch of one rank."""

    epoch: int
    batch: int
    """Counted from 1 at the beginning of the epoch."""
    num_batches: int
    """Batches of that rank in the epoch."""
    samples: tuple[int, ...]
    """Dataset indices, padding left out."""
    given: bool
    """Whether the batch had been given when the checkpoint was saved."""
    left_out: bool
    """Whether the run reads past it, because it has gone back before it."""


def reading_of(plan: LoaderPlan, shuffled: bool) -> dict[str, Any]:  # Any: JSON values
    """What a state must hold so that `find` can compute the samples of a batch; equal on every rank."""
    return {
        "shuffled": shuffled,
        "shards": plan.num_shards,
        "global_batch": plan.global_batch,
        "drop_last": plan.drop_last,
        "even": plan.even,
        "pad": plan.pad,
    }


def find(state: Mapping[str, Any], shard: int, batch: int, epoch: int | None = None) -> Found:
    """The `batch`-th batch (from 1) of data-parallel rank `shard` in an epoch, by default the one that `state` lies in.

    Raises: DataError when the state does not tell, or there is no such batch.
    """
    reading = state.get("reading")
    if reading is None:
        raise DataError(
            "the checkpoint does not say how its loader was read, so the samples of a batch cannot be computed: the loader reads a "
            "stream, or its sampler is of your own. Number the samples in the dataset, and log them with the batch."
        )
    shards, size = int(reading["shards"]), int(state["size"])
    if not 0 <= shard < shards:
        raise DataError(
            f"the loader was read by {shards} data-parallel ranks, and rank {shard} is not among 0 to {shards - 1}."
        )
    even, drop_last = bool(reading["even"]), bool(reading["drop_last"])
    plan = LoaderPlan(
        how="shard",
        num_shards=shards,
        shard=shard,
        global_batch=int(reading["global_batch"]),
        drop_last=drop_last,
        even=even,
        pad=reading.get("pad", "least"),
    )
    steps = plan.steps(size)
    if not 1 <= batch <= steps:
        raise DataError(
            f"batch {batch} does not exist: an epoch has batches 1 to {steps} on each rank ({size} samples, {plan.global_batch} a step)."
        )
    at = int(state["epoch"]) if epoch is None else epoch
    share = plan.share(size, batch - 1)
    positions = np.arange(share.first, share.first + share.real, dtype=np.int64)
    indices = Shuffle(size, int(state["seed"]), at).at(positions) if reading["shuffled"] else positions
    first, end = plan.consumed(size, batch - 1), plan.consumed(size, batch)
    given = (at, end) <= (int(state["epoch"]), int(state["consumed"]))
    out = any(one[0] == at and one[1] < end and first < one[2] for one in state.get("left_out", ()))
    return Found(at, batch, steps, tuple(int(index) for index in indices), given, out)
