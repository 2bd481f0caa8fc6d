"""Rows of micro-batches, and the broadcast of what one rank of a pipeline has computed to the others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hasten import trees
from hasten.comm.process_group import ProcessGroupComm
from hasten.errors import ConfigError, StepError
from hasten.runtime.mesh_plan import divisors


def check_rows(rows: int | None, count: int) -> int:
    """Return the rows of one micro-batch. Raises: ConfigError with numbers that divide the batch."""
    if rows is None:
        raise ConfigError(
            "forward_backward() got a batch without a tensor that has rows, so it cannot be split into micro-batches. "
            "Give tensors whose first dimension is the batch."
        )
    if rows % count:
        raise ConfigError(
            f"a batch of {rows} rows cannot be split into num_microbatches={count} equal parts, so the mean of their losses would not "
            f"be the loss of the batch. Use a batch size that is a multiple of {count} (with "
            f"drop_last=True for the last batch), or num_microbatches from {divisors(rows)}."
        )
    return rows // count


# Any: the model's output
def share(result: Any, comm: ProcessGroupComm, source: int) -> Any:
    """Broadcast a result from one rank to the group: tensors directly, containers as plain values.

    Raises: StepError for containers other than tuples, lists, dicts and model outputs.
    """
    spec: Any = None
    if comm.rank == source:
        try:
            spec = _describe(result)
        except StepError as error:
            spec = str(error)
    spec = comm.broadcast_object(spec, source)
    if isinstance(spec, str):
        raise StepError(spec)
    mine = iter(trees.tensors(result)) if comm.rank == source else iter(())

    def fetch(shape: list[int], dtype: str) -> Tensor:
        own = next(mine, None)
        like = (
            own.detach()
            if own is not None
            else torch.empty(shape, dtype=getattr(torch, dtype), device=comm.device)
        )
        return comm.broadcast(like, source)

    made = _rebuild(spec, fetch)
    return result if comm.rank == source else made


def _describe(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return {"tensor": [list(tree.shape), str(tree.dtype).removeprefix("torch.")]}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return {"value": tree}
    kind = type(tree)
    if kind in (list, tuple):
        return {kind.__name__: [_describe(part) for part in tree]}
    if isinstance(tree, dict):  # transformers' outputs are subclasses of dict
        of = {str(key): _describe(part) for key, part in tree.items()}
        return (
            {"dict": of}
            if kind is dict
            else {"output": [kind.__module__, kind.__qualname__, of]}
        )
    raise StepError(
        f"the model returned a {kind.__name__}, which cannot be sent to the other pipeline stages. Return tensors, or "
        "tuples, lists and dicts of them."
    )


def _rebuild(spec: Any, fetch: Callable[[list[int], str], Tensor]) -> Any:
    ((kind, of),) = spec.items()
    match kind:
        case "tensor":
            return fetch(*of)
        case "value":
            return of
        case "list":
            return [_rebuild(part, fetch) for part in of]
        case "tuple":
            return tuple(_rebuild(part, fetch) for part in of)
        case "dict":
            return {key: _rebuild(part, fetch) for key, part in of.items()}
    module, name, parts = of
    return _loaded(module, name)(
        **{key: _rebuild(part, fetch) for key, part in parts.items()}
    )


def _loaded(module: str, name: str) -> Any:
    """Return a class that this process has imported, as the model that returns its instances has."""
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    return found
