"""Gathering results for metrics: every real sample once, padding dropped by what was really padded."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hasten import trees
from hasten.comm import ops
from hasten.comm.base import Comm
from hasten.errors import ArgumentError, DataError, HastenWarning, MismatchError
from hasten.optim.clock import LoaderCursor
from hasten.trees import Tree


@dataclass(frozen=True, slots=True)
class _Unclear:
    """Sent instead of results by a rank that cannot tell which of them are padding."""

    reason: str


def gather_for_metrics(
    data: Any, comm: Comm, cursor: LoaderCursor | None, objects: bool = False, dim: int | None = None
) -> Any:
    """The rows of every rank's current batch, without the rows its loader padded.

    `cursor` is the loader being iterated, or None outside a loop over one. `dim` is the dimension of the samples, by default
    the first. Any: tensors in any nesting, or objects. Ranks: every rank that reads different samples.
    Raises: DataError when a padded batch's results have no whole number of rows for each of its samples.
    """
    if objects or not trees.tensors(data):
        if dim is not None:
            raise ArgumentError(
                f"gather_for_metrics(dim={dim!r}) was given objects, which have no dimensions, so dim would have no effect. "
                "Pass tensors, or leave dim out."
            )
        return _gather_items(data, comm, cursor)
    try:
        rows = real_rows(_samples_first(data, dim), cursor, warn=dim is None)
    except (ArgumentError, DataError):
        _disagree(comm)
        raise
    gathered = ops.gather_ragged(rows, comm)
    return gathered if not dim else trees.map_tensors(lambda x: x.movedim(0, dim), gathered)


def _samples_first(data: Tree, dim: int | None) -> Tree:
    if not dim:
        return data

    def turned(x: Tensor) -> Tensor:
        if not -x.ndim <= dim < x.ndim:
            raise ArgumentError(
                f"gather_for_metrics(dim={dim}) was given a tensor of shape {tuple(x.shape)}, which has no such dimension, so "
                "its samples cannot be found. Gather tensors with different layouts in separate calls."
            )
        return x.movedim(dim, 0).contiguous()

    return trees.map_tensors(turned, data)


def real_rows(data: Tree, cursor: LoaderCursor | None, warn: bool = False) -> Tree:
    """The tree with the padded rows of the current batch cut off; with `warn`, ambiguous layouts cause a warning."""
    if cursor is None or cursor.num_real is None:
        return data

    def cut(x: Tensor) -> Tensor:
        rows = x.reshape(1) if x.ndim == 0 else x
        if warn:
            _check_layout(rows, cursor)
        return rows[: num_real(rows.shape[0], cursor)]

    return trees.map_tensors(cut, data)


def _check_layout(x: Tensor, cursor: LoaderCursor) -> None:
    """Warn if a later dimension could hold the samples as well; raise if only a later dimension could."""
    real, rows = cursor.num_real, cursor.num_rows
    if not real or rows is None or real == rows or rows not in x.shape[1:]:
        return
    other = 1 + tuple(x.shape[1:]).index(rows)
    found = f"gather_for_metrics() got a tensor of shape {tuple(x.shape)} for a batch of {rows} samples of which {real} are real"
    if x.shape[0] % rows:
        raise DataError(
            f"{found}: the samples are in dimension {other}, not in the first, and cutting the first would drop real results. "
            f"Pass dim={other}."
        )
    warnings.warn(
        f"{found}: both dimension 0 and dimension {other} could be the samples. Dimension 0 was taken; if that is wrong, real "
        f"results were dropped and repeated ones counted. Pass dim=0 or dim={other} to say which.",
        HastenWarning,
        stacklevel=2,
    )


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
