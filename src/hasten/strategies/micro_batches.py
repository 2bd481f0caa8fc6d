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
def broadcast_output(output: Any, group_comm: ProcessGroupComm, source: int) -> Any:
    """Broadcast a result from one rank to the group: tensors directly, containers as plain values.

    Raises: StepError for containers other than tuples, lists, dicts and model outputs.
    """
    spec: Any = None
    if group_comm.rank == source:
        try:
            spec = _describe_tree(output)
        except StepError as error:
            spec = str(error)
    spec = group_comm.broadcast_object(spec, source)
    if isinstance(spec, str):
        raise StepError(spec)
    if group_comm.rank == source:
        local_tensors = iter(trees.tensors(output))
    else:
        local_tensors = iter(())

    def fetch_tensor(shape: list[int], dtype: str) -> Tensor:
        local_tensor = next(local_tensors, None)
        if local_tensor is not None:
            source_tensor = local_tensor.detach()
        else:
            source_tensor = torch.empty(
                shape, dtype=getattr(torch, dtype), device=group_comm.device
            )
        return group_comm.broadcast(source_tensor, source)

    received_output = _rebuild_tree(spec, fetch_tensor)
    return output if group_comm.rank == source else received_output


def _describe_tree(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return {"tensor": [list(tree.shape), str(tree.dtype).removeprefix("torch.")]}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return {"value": tree}
    tree_class = type(tree)
    if tree_class in (list, tuple):
        return {tree_class.__name__: list(map(_describe_tree, tree))}
    if isinstance(tree, dict):  # transformers' outputs are subclasses of dict
        subtrees = {str(key): _describe_tree(subtree) for key, subtree in tree.items()}
        if tree_class is dict:
            return {"dict": subtrees}
        return {"output": [tree_class.__module__, tree_class.__qualname__, subtrees]}
    raise StepError(
        f"the model returned a {tree_class.__name__}, which cannot be sent to the other pipeline stages. Return tensors, or "
        "tuples, lists and dicts of them."
    )


def _rebuild_tree(spec: Any, fetch: Callable[[list[int], str], Tensor]) -> Any:
    ((kind, subtrees),) = spec.items()
    match kind:
        case "tensor":
            return fetch(*subtrees)
        case "value":
            return subtrees
        case "list":
            return [_rebuild_tree(subtree, fetch) for subtree in subtrees]
        case "tuple":
            return tuple(_rebuild_tree(subtree, fetch) for subtree in subtrees)
        case "dict":
            rebuilt_mapping = {}
            for key, subtree in subtrees.items():
                rebuilt_mapping[key] = _rebuild_tree(subtree, fetch)
            return rebuilt_mapping
    module_name, class_name, fields = subtrees
    return _find_class(module_name, class_name)(
        **{key: _rebuild_tree(subtree, fetch) for key, subtree in fields.items()}
    )


def _find_class(module: str, name: str) -> Any:
    """Return a class that this process has imported, as the model that returns its instances has."""
    namespace: Any = sys.modules[module]
    for attribute in name.split("."):
        namespace = getattr(namespace, attribute)
    return namespace
