"""Gathering results for metrics: every real sample once, padding dropped by what was really padded."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hasten import trees
from hasten.comm import ops
from hasten.comm.base import Comm
from hasten.optim.clock import LoaderCursor
from hasten.trees import Tree


def gather_for_metrics(data: Any, comm: Comm, cursor: LoaderCursor | None, objects: bool = False) -> Any:
    """The rows of every rank's current batch, without the rows its loader padded.

    `cursor` is the loader being iterated, or None outside a loop over one. Any: tensors in any nesting, or objects.
    Ranks: every rank that reads different samples.
    """
    if objects or not trees.tensors(data):
        return ops.gather_object(_real_items(data, cursor), comm)
    return ops.gather_ragged(real_rows(data, cursor), comm)


def real_rows(data: Tree, cursor: LoaderCursor | None) -> Tree:
    """The tree with the padded rows of the current batch cut off."""
    if cursor is None or cursor.num_real is None:
        return data
    real, rows = cursor.num_real, cursor.num_rows

    def cut(x: Tensor) -> Tensor:
        if x.ndim == 0:  # one number for the whole batch: gone where all of it is padding
            return x.reshape(1)[:real]
        padded = x.shape[0] == rows if rows is not None else x.shape[0] > real
        return x[:real] if padded else x

    return trees.map_tensors(cut, data)


def _real_items(data: Any, cursor: LoaderCursor | None) -> Any:  # Any: the caller's objects
    items = data if isinstance(data, list) else list(data) if isinstance(data, tuple) else [data]
    if cursor is None or cursor.num_real is None:
        return items
    padded = len(items) == cursor.num_rows if cursor.num_rows is not None else len(items) > cursor.num_real
    return items[: cursor.num_real] if padded else items
