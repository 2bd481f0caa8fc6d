"""Optimizers that work element by element update this rank's shards as plain tensors, past the cost of DTensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from hasten.modules.dtensors import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

ELEMENTWISE: Final = (SGD, Adam, AdamW, RMSprop, Adagrad, Adadelta, Adamax, NAdam, RAdam, ASGD, Rprop)
"""No number of theirs depends on another element, so a shard updated alone is the shard of the whole update."""
Collect = Callable[..., Any]  # Any: torch's own, by optimizer


def update_own_shards(optimizer: Optimizer) -> None:
    """Let the optimizer's kernels see shards as plain tensors; harmless to repeat.

    A DTensor checks and wraps in Python at every operation, which on small shards takes longer than the operation.
    Parameters, gradients and state stay DTensors for everybody else. Optimizers of other classes, and those without
    a DTensor among their parameters, are left alone.
    """
    if not any(is_dtensor(p) for group in optimizer.param_groups for p in group["params"]):
        return
    collect: Collect | None = getattr(optimizer, "_init_group", None)
    if type(optimizer) in ELEMENTWISE and collect is not None and not isinstance(collect, partial):
        optimizer._init_group = partial(_collect_shards, collect)  # type: ignore[attr-defined]  # torch's inner seam
        if type(optimizer) is SGD:
            optimizer.register_step_post_hook(_forget_parts)


def _forget_parts(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """SGD files its momentum under what it updated: the shard holds it already, in the same memory."""
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for stranger in [parameter for parameter in optimizer.state if id(parameter) not in known]:
        del optimizer.state[stranger]


def _collect_shards(collect: Collect, group: dict[str, Any], *lists: list[Any]) -> Any:  # Any: torch's own
    """What one update takes (parameters, gradients, state), with this rank's part in place of every shard."""
    told = collect(group, *lists)
    if group.get("differentiable") or not _all_shards_alike(lists):
        return told
    for values in lists:
        values[:] = [value._local_tensor if is_dtensor(value) else value for value in values]
    return told


def _all_shards_alike(lists: tuple[list[Any], ...]) -> bool:
    """Whether parameters, gradients and state of each parameter are cut alike.

    State that the update itself makes (None until then) must be made as a DTensor.
    """
    filled = [values for values in lists if values]
    if len({len(values) for values in filled}) != 1:
        return False
    for values in zip(*filled, strict=True):
        first = values[0]
        if not is_dtensor(first):
            return False
        for value in values[1:]:
            if value is None or (isinstance(value, Tensor) and value.ndim and not _cut_alike(value, first)):
                return False
    return True


def _cut_alike(value: Tensor, other: DTensor) -> bool:
    return is_dtensor(value) and value.placements == other.placements and value.shape == other.shape
