"""Checks of what users pass to the Accelerator's methods: a wrong kind is refused by name, before it fails somewhere inside."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any, Final, NoReturn

from torch import Tensor, nn

from hasten.errors import ArgumentError

_MAX_CHARS = 60
_LABELS: Final = ("labels", "label", "label_ids")


def refuse(call: str, value: object, need: str) -> NoReturn:
    """Refuse the argument of a call; `need` says what it must be and what to give instead."""
    raise ArgumentError(f"accelerator.{call} got {_shown(value)} of type {type(value).__qualname__}; {need}.")


def check_loss(loss: object, batch: object) -> None:
    """Refuse a loss that nothing can be backpropagated from; `batch` is the one that the loop reads, None if it is not known."""
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


def check_count(value: object, call: str) -> None:
    """Refuse what is not a whole number from 0 up."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        refuse(call, value, "it needs a whole number from 0 up, such as 3")


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
