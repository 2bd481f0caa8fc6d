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


def refuse(call: str, value: object, need: str) -> NoReturn:
    """Raise ArgumentError for an argument of a call; `need` says what it must be and what to pass instead."""
    shown = (
        f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else repr(value)
    )
    if len(shown) > _MAX_CHARS:
        shown = f"{shown[:_MAX_CHARS]}…"
    raise ArgumentError(
        f"accelerator.{call} got {shown} of type {type(value).__qualname__}; {need}."
    )


# Any: a class, a union or an abstract class
def check_type(call: str, kind: Any, need: str, *values: object) -> None:
    """Raise unless every value is an instance of `kind`."""
    for value in values:
        if not isinstance(value, kind):
            refuse(call, value, need)


# Any: the user's
def check_number(
    call: str, value: Any, least: float | None = None, whole: bool = False
) -> None:
    """Raise unless `value` is one number, a whole one if asked for, and at least `least`."""
    need = "it needs a whole number" if whole else "it needs a number"
    if least is not None:
        need = f"{need} of at least {least}"
    is_scalar = isinstance(value, Tensor) and value.numel() == 1
    if isinstance(value, bool) or not (
        is_scalar or isinstance(value, Integral if whole else Real)
    ):
        refuse(call, value, need)
    # reading it would synchronise with the device
    if least is None or (is_scalar and not value.is_cpu):
        return
    if not float(value) >= least:
        refuse(call, value, f"{need}, since nan and smaller ones make no sense")


def check_loss(loss: object, batch: object) -> None:
    """Raise for a `loss` that is no tensor; `batch` is the batch that the loop reads, None if unknown."""
    if loss is not None:
        need = "only a tensor has gradients to backpropagate. Give the loss itself, not loss.item() or the model's whole output"
        check_type("backward(loss)", Tensor, need, loss)
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


def check_tensors(tree: Tree, call: str) -> None:
    """Raise if `tree` holds no tensor, which a collective would return unchanged; empty containers and None are accepted."""
    if isinstance(tree, Tensor) or tree is None or trees.tensors(tree):
        return
    if not trees.is_container(tree) or any(True for _ in trees.paths(tree)):
        need = "it works on tensors, and the values of the other processes would be missing. Use gather_object for objects"
        refuse(call, tree, f"{need}, or wrap the number in torch.tensor(...)")


def check_axes(axes: object) -> None:
    """Raise unless `axes` is a list of distinct mesh axes."""
    call, need = (
        "gather(axes) and other collectives",
        f"it needs a list of mesh axes, such as [Axis.TP]; there are {', '.join(AXES)}",
    )
    if isinstance(axes, str) or not isinstance(axes, Iterable):
        refuse(call, axes, need)
    names = list(axes)
    for axis in names:
        if not isinstance(axis, str) or axis not in AXES:
            refuse(call, axis, need)
    if len(set(names)) < len(names):
        refuse(call, names, "an axis is named twice. Name each once")


def check_cursor(loader: object, call: str) -> LoaderCursor:
    """Return the cursor of a prepared loader; raise for anything else."""
    cursor = getattr(loader, "cursor", None)
    if not isinstance(cursor, LoaderCursor):
        refuse(
            call,
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
