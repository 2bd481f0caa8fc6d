"""Checks of the arguments of the Accelerator's methods, which name the wrong argument before it fails deep inside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any, Final, NoReturn, TypedDict

from torch import Tensor

from hasten import trees
from hasten.errors import ArgumentError
from hasten.optim.loader_progress import LoaderCursor
from hasten.runtime.mesh_plan import AXES
from hasten.trees import Tree

_MAX_CHARS: Final = 60
_LABELS: Final = ("labels", "label", "label_ids")
MODELS: Final = (
    "it needs models (torch.nn.Module). Give the models that prepare() returned"
)
FUNCTION: Final = "it needs a function"


def refuse(call_name: str, value: object, requirement: str) -> NoReturn:
    """Raise ArgumentError for an argument of a call; `need` says what it must be and what to pass instead."""
    if isinstance(value, Tensor):
        shown = f"a tensor of shape {tuple(value.shape)}"
    else:
        shown = repr(value)
    if len(shown) > _MAX_CHARS:
        shown = f"{shown[:_MAX_CHARS]}…"
    raise ArgumentError(
        f"accelerator.{call_name} got {shown} of type {type(value).__qualname__}; {requirement}."
    )


# Any: a class, a union or an abstract class
def check_type(call_name: str, kind: Any, requirement: str, *values: object) -> None:
    """Raise unless every value is an instance of `kind`."""
    for value in values:
        if not isinstance(value, kind):
            refuse(call_name, value, requirement)


# Any: the user's
def check_number(
    call_name: str, value: Any, least: float | None = None, is_integer: bool = False
) -> None:
    """Raise unless `value` is one number, a whole one if asked for, and at least `least`."""
    requirement = "it needs a whole number" if is_integer else "it needs a number"
    if least is not None:
        requirement = f"{requirement} of at least {least}"
    is_scalar = isinstance(value, Tensor) and value.numel() == 1
    if isinstance(value, bool) or not (
        is_scalar or isinstance(value, Integral if is_integer else Real)
    ):
        refuse(call_name, value, requirement)
    # reading it would synchronise with the device
    if least is None or (is_scalar and not value.is_cpu):
        return
    if not float(value) >= least:
        refuse(
            call_name, value, f"{requirement}, since nan and smaller ones make no sense"
        )


def check_loss(loss: object, batch: object) -> None:
    """Raise for a `loss` that is no tensor; `batch` is the batch that the loop reads, None if unknown."""
    if loss is not None:
        requirement = "only a tensor has gradients to backpropagate. Give the loss itself, not loss.item() or the model's whole output"
        check_type("backward(loss)", Tensor, requirement, loss)
        return
    if not isinstance(batch, Mapping):
        reason = "and there is nothing to backpropagate. Give the model its labels, or compute the loss from what it returns"
    elif any(name in batch for name in _LABELS):
        reason = f"although the batch has labels ({', '.join(map(str, batch))}). Pass them to the model, as in model(**batch)"
    else:
        reason = f"and the batch has no 'labels' (it has {', '.join(map(str, batch))}). Add labels to the samples of the dataset"
    raise ArgumentError(
        f"accelerator.backward(loss) got None: the model returned no loss, {reason}."
    )


def check_tensors(tree: Tree, call_name: str) -> None:
    """Raise if `tree` holds no tensor, which a collective would return unchanged; empty containers and None are accepted."""
    if isinstance(tree, Tensor) or tree is None or trees.tensors(tree):
        return
    if not trees.is_container(tree) or any(True for _ in trees.paths(tree)):
        requirement = "it works on tensors, and the values of the other processes would be missing. Use gather_object for objects"
        refuse(
            call_name, tree, f"{requirement}, or wrap the number in torch.tensor(...)"
        )


def check_axes(axes: object) -> None:
    """Raise unless `axes` is a list of distinct mesh axes."""
    call_name, requirement = (
        "gather(axes) and other collectives",
        f"it needs a list of mesh axes, such as [Axis.TP]; there are {', '.join(AXES)}",
    )
    if isinstance(axes, str) or not isinstance(axes, Iterable):
        refuse(call_name, axes, requirement)
    names = list(axes)
    for axis in names:
        if not isinstance(axis, str) or axis not in AXES:
            refuse(call_name, axis, requirement)
    if len(set(names)) < len(names):
        refuse(call_name, names, "an axis is named twice. Name each once")


def check_cursor(loader: object, call_name: str) -> LoaderCursor:
    """Return the cursor of a prepared loader; raise for anything else."""
    cursor = getattr(loader, "cursor", None)
    if not isinstance(cursor, LoaderCursor):
        refuse(
            call_name,
            loader,
            "only a prepared loader knows its padding and its end. Give the loader that prepare() returned",
        )
    return cursor


class PushOptions(TypedDict, total=False):
    """Options of `push_to_hub`. Any: a tokenizer or processor."""

    token: str | None
    private: bool | None
    revision: str | None
    commit_message: str
    max_shard_size: float | str
    tokenizer: Any
