"""The loss of a batch, from the model's output, and the number of labels it averages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hasten.errors import ArgumentError
from hasten.extensions.trainer.collate import IGNORED

# Any in this file: batches and outputs of any type.


def run_model(model: nn.Module, inputs: Any) -> Any:
    """Call the model on a batch: a mapping is passed by name, a tuple or list by position."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def loss_or_none(outputs: Any) -> Tensor | None:
    """Return the loss in a model's output: key or attribute `loss`, the first of a tuple, or a scalar itself; None if absent."""
    loss: Any
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    elif isinstance(outputs, (tuple, list)) and not hasattr(outputs, "loss"):
        loss = outputs[0] if outputs else None
    else:
        loss = getattr(outputs, "loss", outputs)
    return loss if isinstance(loss, Tensor) and loss.ndim == 0 else None


def loss_in(outputs: Any, unlabelled: bool = False) -> Tensor:
    """Return the loss in a model's output; `unlabelled` batches get a hint. Raises: ArgumentError if there is none."""
    loss = loss_or_none(outputs)
    if loss is None:
        cause_words = (
            " The batch has no labels, without which most models compute no loss: add them to the samples."
            * unlabelled
        )
        raise ArgumentError(
            f"the model returned a {type(outputs).__qualname__} without a scalar loss, so there is nothing to train on.{cause_words} Return "
            "the loss, a tuple that begins with it or a dict with 'loss', or override compute_loss."
        )
    return loss


def outputs_besides_loss(outputs: Any, has_loss: bool) -> Any:
    """Return a model's output without its loss: a single tensor alone, several as a tuple, None for nothing."""
    if isinstance(outputs, Mapping):
        outputs = dict(outputs)
        outputs.pop("loss", None)
        outputs.pop("past_key_values", None)
        model_outputs = tuple(outputs.values())
    elif isinstance(outputs, (tuple, list)):
        model_outputs = tuple(outputs[1:] if has_loss else outputs)
    else:
        model_outputs = () if has_loss else (outputs,)
    model_outputs = tuple(value for value in model_outputs if value is not None)
    return model_outputs[0] if len(model_outputs) == 1 else model_outputs or None


def labels_in(inputs: Any, names: Sequence[str]) -> Tensor | None:
    """Return the first label tensor of a batch."""
    if not isinstance(inputs, Mapping):
        return None
    for name in names:
        labels = inputs.get(name)
        if isinstance(labels, Tensor):
            return labels
    return None


def num_items(labels: Tensor | None, shifted: bool) -> Tensor | None:
    """Return the number of labels a loss averages: those that are not -100, without the first of each row if `shifted`.

    None without labels: the batch then has the same weight as any other.
    """
    if labels is None:
        return None
    if labels.is_floating_point():
        return torch.tensor(float(labels.numel()))
    counted_labels = labels[..., 1:] if shifted and labels.ndim > 1 else labels
    return (counted_labels != IGNORED).sum()


def shifts_labels(model: nn.Module) -> bool:
    """Return whether the model's loss compares each position with the next label, which `loss_type = "ForCausalLM"` marks."""
    return getattr(model, "loss_type", None) == "ForCausalLM"
