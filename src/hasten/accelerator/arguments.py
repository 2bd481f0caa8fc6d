"""Checks of the arguments of the Accelerator's methods, which name the wrong argument before it fails deep inside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Final, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from hasten import trees
from hasten.errors import ArgumentError, PrepareError
from hasten.optim.loader_progress import LoaderCursor
from hasten.runtime.mesh_plan import AXES
from hasten.trees import Tree

_MAX_CHARS = 60
_LABELS: Final = ("labels", "label", "label_ids")


def refuse(call: str, value: object, need: str) -> NoReturn:
    """Raise ArgumentError for an argument of a call; `need` says what it must be and what to pass instead."""
    raise ArgumentError(f"accelerator.{call} got {_shown(value)} of type {type(value).__qualname__}; {need}.")


def check_loss(loss: object, batch: object) -> None:
    """Raise unless `loss` can be backpropagated; `batch` is the batch that the loop reads, None if unknown."""
    if loss is None:
        raise ArgumentError(f"accelerator.backward(loss) got None: the model returned no loss, {_why_no_loss(batch)}.")
    if not isinstance(loss, Tensor):
        need = "only a tensor has gradients to backpropagate. Give the loss itself, not loss.item() or the model's whole output"
        refuse("backward(loss)", loss, need)


def _why_no_loss(batch: object) -> str:
    if not isinstance(batch, Mapping):
        return (
            "and there is nothing to backpropagate. Give the model its labels if it computes its loss from them, or compute "
            "the loss from what it returns"
        )
    names = ", ".join(map(str, batch))
    if any(name in batch for name in _LABELS):
        return (
            f"although the batch has labels ({names}). Pass them to the model, as in model(**batch), or compute the loss from "
            "what it returns"
        )
    return (
        f"and the batch has no 'labels' (it has {names}), without which models compute none. Add labels to the samples of the "
        "dataset, or compute the loss from what the model returns"
    )


def check_model(model: object, call: str) -> None:
    """Raise unless `model` has a state dict."""
    if not hasattr(model, "state_dict"):
        refuse(call, model, "it needs a model with a state_dict(). Give the model that prepare() returned")


def check_modules(models: tuple[object, ...], call: str) -> None:
    """Raise unless every item is a module."""
    for model in models:
        if not isinstance(model, nn.Module):
            refuse(call, model, "it needs models (torch.nn.Module). Give the models that prepare() returned")


def check_loader(loader: object, call: str) -> None:
    """Raise unless `loader` is a DataLoader."""
    if not hasattr(loader, "batch_sampler") or not hasattr(loader, "dataset"):
        need = "it needs a torch.utils.data.DataLoader, whose dataset and sampler can be divided. Wrap the data in one"
        refuse(call, loader, need)


def check_number(value: object, call: str) -> None:
    """Raise unless `value` is one number."""
    if not isinstance(value, Real) and not (isinstance(value, Tensor) and value.numel() == 1):
        refuse(call, value, "it needs a number, such as 1.0")


def check_whole(value: object, call: str, least: int | None = None) -> None:
    """Raise unless `value` is an integer, and at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        refuse(call, value, "it needs a whole number")
    if least is not None and int(value) < least:
        refuse(call, value, f"it needs a whole number of at least {least}")


def check_dim(tree: Tree, dim: int, call: str) -> None:
    """Raise unless a tensor of the tree has this dimension."""
    ndims = [tensor.ndim for tensor in trees.tensors(tree)]
    if not any(-ndim <= dim < ndim for ndim in ndims):
        refuse(call, dim, f"the tensors have {max(ndims, default=0)} dimensions. Give one of these, counted from 0")


def check_limit(value: object, call: str) -> None:
    """Raise unless a gradient limit is one number of at least 0; inf means no limit."""
    check_number(value, call)
    if isinstance(value, Tensor) and not value.is_cpu:  # reading it would synchronise with the device
        return
    if isinstance(value, bool) or not float(value) >= 0:  # type: ignore[arg-type]  # a number or a tensor with one
        need = "a limit below 0, or nan, would turn or destroy every gradient. Give a number of at least 0, such as 1.0"
        refuse(call, value, need)


def check_norm_type(value: object) -> None:
    """Raise unless `value` is a valid order of a norm."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
        refuse(
            "clip_grad_norm_(norm_type)",
            value,
            "it needs the order of a norm, above 0: 2.0, or inf for the largest element",
        )


def check_flag(value: object, call: str) -> None:
    """Raise unless `value` is a boolean."""
    if not isinstance(value, bool):
        refuse(call, value, "it needs True or False")


def check_tensors(tree: Tree, call: str) -> None:
    """Raise if `tree` holds no tensor, which a collective would return unchanged; empty containers and None are accepted."""
    if isinstance(tree, Tensor) or tree is None or trees.tensors(tree):
        return
    if not trees.is_container(tree) or any(True for _ in trees.paths(tree)):
        need = (
            "it works on tensors, and the values of the other processes would be missing. Use gather_object for objects"
        )
        refuse(call, tree, f"{need}, or wrap the number in torch.tensor(...)")


def check_axes(axes: object) -> None:
    """Raise unless `axes` is a list of distinct mesh axes."""
    known = ", ".join(AXES)
    need = f"it needs a list of mesh axes, such as [Axis.TP]; there are {known}"
    if isinstance(axes, str) or not isinstance(axes, Iterable):
        refuse("gather(axes) and other collectives", axes, need)
    names = list(axes)
    for axis in names:
        if not isinstance(axis, str) or axis not in AXES:
            refuse("gather(axes) and other collectives", axis, need)
    if len(set(names)) < len(names):
        refuse(
            "gather(axes) and other collectives", names, f"an axis is named twice. Name each once; there are {known}"
        )


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


def check_method(model: nn.Module, name: object) -> None:
    """Raise unless `name` is the name of a method of the model."""
    if not isinstance(name, str) or not callable(getattr(model, name, None)):
        raise PrepareError(
            f"mark_forward_method({type(model).__name__}, {name!r}): {type(model).__name__} has no method {name!r} to mark, so calls "
            "would not synchronise gradients; check the spelling."
        )


def check_placement(placement: object) -> None:
    """Raise unless `placement` is None or a list of booleans."""
    if placement is not None and not (
        isinstance(placement, Sequence) and all(isinstance(one, bool) for one in placement)
    ):
        refuse("prepare(device_placement)", placement, "it needs a list with True or False for each object")


def check_joinables(joinables: object) -> None:
    """Raise unless `joinables` is a list of models and optimizers."""
    call, need = "join_uneven_inputs(joinables)", "it needs a list of prepared models and optimizers"
    check_iterable(joinables, call, need)
    for one in joinables:  # type: ignore[attr-defined]  # iterable, as checked above
        if not isinstance(one, nn.Module | Optimizer):
            refuse(call, one, need)


def check_parameters(parameters: list[Any], call: str) -> None:  # Any: the user's argument
    """Raise unless every item is a tensor."""
    for parameter in parameters:
        if not isinstance(parameter, Tensor):
            refuse(call, parameter, "it needs parameters (tensors). Give model.parameters()")


def check_iterable(value: object, call: str, need: str) -> None:
    """Raise unless `value` is iterable."""
    if not hasattr(value, "__iter__"):
        refuse(call, value, need)


def check_list(value: object, call: str) -> None:
    """Raise unless `value` is a list, whose items can be replaced."""
    if not isinstance(value, list):
        refuse(call, value, "it needs a list, whose items are replaced in place")


def check_kind(value: object, kind: type, call: str) -> None:
    """Raise unless `value` is a settings object of class `kind`, or None for the default."""
    if value is not None and not isinstance(value, kind):
        refuse(call, value, f"it needs a {kind.__name__}(...), or nothing for the settings of this run")


def check_callable(value: object, call: str, when: str = "in each step") -> None:
    """Raise unless `value` is callable."""
    if not callable(value):
        refuse(call, value, f"it needs a function, which is called {when}")


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}…"
