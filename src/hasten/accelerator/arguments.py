"""Checks of what users pass to the Accelerator's methods: a wrong kind is refused by name, before it fails somewhere inside."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, NoReturn

from torch import Tensor, nn

from hasten.errors import ArgumentError

_MAX_CHARS = 60


def refuse(call: str, value: object, need: str) -> NoReturn:
    """Refuse the argument of a call; `need` says what it must be and what to give instead."""
    raise ArgumentError(f"accelerator.{call} got {_shown(value)} of type {type(value).__qualname__}; {need}.")


def check_loss(loss: object) -> None:
    """Refuse a loss that nothing can be backpropagated from."""
    if not isinstance(loss, Tensor):
        need = "only a tensor has gradients to backpropagate. Give the loss itself, not loss.item() or the model's whole output"
        refuse("backward(loss)", loss, need)


def check_model(model: object, call: str) -> None:
    """Refuse what has no weights."""
    if not hasattr(model, "state_dict"):
        refuse(call, model, "it needs a model with a state_dict(). Give the model that prepare() returned")


def check_modules(models: tuple[object, ...], call: str) -> None:
    """Refuse what is not a module."""
    for model in models:
        if not isinstance(model, nn.Module):
            refuse(call, model, "it needs models (torch.nn.Module). Give the models that prepare() returned")


def check_loader(loader: object, call: str) -> None:
    """Refuse what is not a DataLoader."""
    if not hasattr(loader, "batch_sampler") or not hasattr(loader, "dataset"):
        need = "it needs a torch.utils.data.DataLoader, whose dataset and sampler can be divided. Wrap the data in one"
        refuse(call, loader, need)


def check_number(value: object, call: str) -> None:
    """Refuse what is not one number."""
    if not isinstance(value, Real) and not (isinstance(value, Tensor) and value.numel() == 1):
        refuse(call, value, "it needs a number, such as 1.0")


def check_whole(value: object, call: str, least: int | None = None) -> None:
    """Refuse what is not a whole number, or is less than `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        refuse(call, value, "it needs a whole number")
    if least is not None and value < least:
        refuse(call, value, f"it needs a whole number of at least {least}")


def check_parameters(parameters: list[Any], call: str) -> None:  # Any: what the user gave
    """Refuse what are not tensors."""
    for parameter in parameters:
        if not isinstance(parameter, Tensor):
            refuse(call, parameter, "it needs parameters (tensors). Give model.parameters()")


def check_iterable(value: object, call: str, need: str) -> None:
    """Refuse what cannot be iterated over."""
    if not hasattr(value, "__iter__"):
        refuse(call, value, need)


def check_kind(value: object, kind: type, call: str) -> None:
    """Refuse a settings object of another class; None is the default's place."""
    if value is not None and not isinstance(value, kind):
        refuse(call, value, f"it needs a {kind.__name__}(...), or nothing for the settings of this run")


def check_callable(value: object, call: str, when: str = "in each step") -> None:
    """Refuse what cannot be called."""
    if not callable(value):
        refuse(call, value, f"it needs a function, which is called {when}")


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}…"
