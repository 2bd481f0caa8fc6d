"""Gathering results for metrics: every real sample once, padding dropped by what was really padded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hasten import trees
from hasten.comm import ops
from hasten.comm.base import Comm
from hasten.errors import DataError, MismatchError
from hasten.optim.clock import LoaderCursor
from hasten.trees import Tree


@dataclass(frozen=True, slots=True)
class _Unclear:
    """Sent instead of results by a rank that cannot tell which of them are padding."""

    reason: str


def gather_for_metrics(data: Any, comm: Comm, cursor: LoaderCursor | None, objects: bool = False) -> Any:
    """The rows of every rank's current batch, without the rows its loader padded.

    `cursor` is the loader being iterated, or None outside a loop over one. Any: tensors in any nesting, or objects.
    Ranks: every rank that reads different samples.
    Raises: DataError when a padded batch's results have no whole number of rows for each of its samples.
    """
    if objects or not trees.tensors(data):
        return _gather_items(data, comm, cursor)
    try:
        rows = real_rows(data, cursor)
    except DataError:
        _disagree(comm)
        raise
    return ops.gather_ragged(rows, comm)


def real_rows(data: Tree, cursor: LoaderCursor | None) -> Tree:
    """The tree with the padded rows of the current batch cut off."""
    if cursor is None or cursor.num_real is None:
        return data

    def cut(x: Tensor) -> Tensor:
        rows = x.reshape(1) if x.ndim == 0 else x
        return rows[: num_real(rows.shape[0], cursor)]

    return trees.map_tensors(cut, data)


def num_real(length: int, cursor: LoaderCursor) -> int:
    """How many of a result's rows belong to real samples: one or more for each, or one for the whole batch.

    Raises: DataError when they cannot be told from padding.
    """
    real, rows = cursor.num_real, cursor.num_rows
    if real is None or length == 0:
        return length
    if real == 0 or length == 1:  # one number for the whole batch: gone where all of it is padding
        return min(real, length)
    if rows is None:  # batches without rows of the plan's: all of them are real or none is
        return length
    if length % rows:
        raise DataError(
            f"gather_for_metrics() got {length} rows for a batch of {rows} samples of which {real} are real; it cannot "
            f"tell which rows belong to padding, and counting them would bias the metric. Pass results with one row, "
            f"or a fixed number of rows, for each sample, or use even_batches=False."
        )
    return length // rows * real


def _gather_items(data: Any, comm: Comm, cursor: LoaderCursor | None) -> Any:  # Any: the caller's objects
    items = data if isinstance(data, list) else list(data) if isinstance(data, tuple) else [data]
    if cursor is not None and cursor.num_real is not None:
        try:
            items = items[: num_real(len(items), cursor)]
        except DataError as error:
            ops.gather_object([_Unclear(str(error))], comm)
            raise
    gathered = ops.gather_object(items, comm)
    for item in gathered:
        if isinstance(item, _Unclear):
            raise DataError(f"on another rank, {item.reason}")
    return gathered


def _disagree(comm: Comm) -> None:
    """Make the ranks that wait for this one's rows raise instead: what they bring differs from this."""
    try:
        ops.gather_ragged({"rows that cannot be told from padding": torch.zeros(1, device=comm.device)}, comm)
    except MismatchError:
        return
