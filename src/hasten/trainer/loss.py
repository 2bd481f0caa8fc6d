"""The loss of a batch: taken from what the model returns, or smoothed; and how many items it is the mean of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hasten.errors import ArgumentError
from hasten.trainer.collate import IGNORED

# Any in this file: batches and outputs are the user's own.


def run_model(model: nn.Module, inputs: Any) -> Any:
    """What the model returns for a batch: a mapping is passed by name, a tuple or list by position."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def loss_or_none(outputs: Any) -> Tensor | None:
    """The loss a model returned: `outputs["loss"]`, `outputs.loss`, the first of a tuple, or a scalar itself; None for none."""
    found: Any
    if isinstance(outputs, Mapping):
        found = outputs.get("loss")
    elif isinstance(outputs, (tuple, list)) and not hasattr(outputs, "loss"):
        found = outputs[0] if outputs else None
    else:
        found = getattr(outputs, "loss", outputs)
    return found if isinstance(found, Tensor) and found.ndim == 0 else None


def loss_in(outputs: Any) -> Tensor:
    """The loss a model returned. Raises: ArgumentError when there is none."""
    found = loss_or_none(outputs)
    if found is None:
        raise ArgumentError(
            f"the model returned a {type(outputs).__qualname__} without a scalar loss, so there is nothing to train on; return "
            "the loss, a tuple that begins with it or a dict with 'loss' (give labels in the batch), or override compute_loss."
        )
    return found


def outputs_besides_loss(outputs: Any, has_loss: bool) -> Any:
    """What a model returned without its loss: one tensor alone, several as a tuple, None for nothing."""
    if isinstance(outputs, Mapping):
        rest = tuple(value for key, value in outputs.items() if key not in ("loss", "past_key_values"))
    elif isinstance(outputs, (tuple, list)):
        rest = tuple(outputs[1:] if has_loss else outputs)
    else:
        rest = () if has_loss else (outputs,)
    rest = tuple(value for value in rest if value is not None)
    return rest[0] if len(rest) == 1 else rest or None


def labels_in(inputs: Any, names: Sequence[str]) -> Tensor | None:
    """The first label tensor of a batch."""
    if not isinstance(inputs, Mapping):
        return None
    return next((inputs[name] for name in names if isinstance(inputs.get(name), Tensor)), None)


def num_items(labels: Tensor | None, shifted: bool) -> Tensor | None:
    """The labels that a loss is the mean of: those that are not -100, without the first of each row if it predicts the next.

    None without labels: the batch then weighs as much as any other.
    """
    if labels is None:
        return None
    if labels.is_floating_point():
        return torch.tensor(float(labels.numel()))
    counted = labels[..., 1:] if shifted and labels.ndim > 1 else labels
    return (counted != IGNORED).sum()


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model's loss compares each position with the next label, as it says by `loss_type = "ForCausalLM"`."""
    return getattr(model, "loss_type", None) == "ForCausalLM"


def smoothed_loss(logits: Tensor, labels: Tensor, smoothing: float, shifted: bool) -> Tensor:
    """The mean cross entropy against labels mixed with the uniform distribution; labels of -100 are left out."""
    if shifted:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, label_smoothing=smoothing)
