"""The loss of a batch, from the model's output or smoothed, and the number of labels it averages."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
        cause = (
            " The batch has no labels, without which most models compute no loss: add them to the samples."
            * unlabelled
        )
        raise ArgumentError(
            f"the model returned a {type(outputs).__qualname__} without a scalar loss, so there is nothing to train on.{cause} Return "
            "the loss, a tuple that begins with it or a dict with 'loss', or override compute_loss."
        )
    return loss


def outputs_besides_loss(outputs: Any, has_loss: bool) -> Any:
    """Return a model's output without its loss: a single tensor alone, several as a tuple, None for nothing."""
    if isinstance(outputs, Mapping):
        other_outputs = tuple(
            value
            for key, value in outputs.items()
            if key not in ("loss", "past_key_values")
        )
    elif isinstance(outputs, (tuple, list)):
        other_outputs = tuple(outputs[1:] if has_loss else outputs)
    else:
        other_outputs = () if has_loss else (outputs,)
    other_outputs = tuple(value for value in other_outputs if value is not None)
    return other_outputs[0] if len(other_outputs) == 1 else other_outputs or None


def labels_in(inputs: Any, names: Sequence[str]) -> Tensor | None:
    """Return the first label tensor of a batch."""
    if not isinstance(inputs, Mapping):
        return None
    return next(
        (inputs[name] for name in names if isinstance(inputs.get(name), Tensor)), None
    )


def num_items(labels: Tensor | None, shifted: bool) -> Tensor | None:
    """Return the number of labels a loss averages: those that are not -100, without the first of each row if `shifted`.

    None without labels: the batch then has the same weight as any other.
    """
    if labels is None:
        return None
    if labels.is_floating_point():
        return torch.tensor(float(labels.numel()))
    counted = labels[..., 1:] if shifted and labels.ndim > 1 else labels
    return (counted != IGNORED).sum()


def shifts_labels(model: nn.Module) -> bool:
    """Return whether the model's loss compares each position with the next label, which `loss_type = "ForCausalLM"` marks."""
    return getattr(model, "loss_type", None) == "ForCausalLM"


def needs_labels(model: nn.Module, names: Sequence[str]) -> bool:
    """Return whether the model cannot be called without labels: as a required argument, or as a decoder's inputs."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return True
    taken = inspect.signature(model.forward).parameters
    return any(
        name in taken and taken[name].default is inspect.Parameter.empty
        for name in names
    )


def labels_to_smooth(inputs: Any, names: Sequence[str]) -> Tensor:
    """Return the class labels of a batch. Raises: ArgumentError if it has none that could be smoothed."""
    labels = labels_in(inputs, names)
    if labels is None or labels.is_floating_point():
        kind = (
            f"a {type(inputs).__qualname__}"
            if not isinstance(inputs, Mapping)
            else f"a dict of {', '.join(inputs)}"
        )
        label_words = (
            f"its labels are {labels.dtype}"
            if labels is not None
            else "it has no labels under these names"
        )
        raise ArgumentError(
            f"label_smoothing_factor smooths the class labels of a batch ({', '.join(names)}), and the batch is {kind}: {label_words}. "
            "The loss would not be smoothed. Use samples that are dicts with integer labels, set label_names, or remove "
            "label_smoothing_factor."
        )
    return labels


def logits_in(outputs: Any) -> Tensor:
    """Return the logits in a model's output: `outputs["logits"]`, `outputs.logits`, or the first tensor besides its loss.

    Raises: ArgumentError if there are none.
    """
    logits = (
        outputs.get("logits")
        if isinstance(outputs, Mapping)
        else getattr(outputs, "logits", None)
    )
    if logits is None and not isinstance(outputs, Mapping):
        logits = outputs_besides_loss(outputs, loss_or_none(outputs) is not None)
    logits = logits[0] if isinstance(logits, (tuple, list)) and logits else logits
    if not isinstance(logits, Tensor) or logits.ndim < 2:
        raise ArgumentError(
            f"label_smoothing_factor needs the model's logits, and it returned a {type(outputs).__qualname__} without them, so the "
            "smoothed loss cannot be computed; return a dict with 'logits' (or a tuple of loss and logits), or remove "
            "label_smoothing_factor."
        )
    return logits


def smoothed_loss(
    logits: Tensor, labels: Tensor, smoothing: float, shifted: bool
) -> Tensor:
    """Return the mean cross entropy against labels mixed with the uniform distribution; labels of -100 are ignored."""
    if shifted:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    if logits.shape[:-1].numel() != labels.numel():
        raise ArgumentError(
            f"label_smoothing_factor needs logits of shape (*labels, classes), but labels are {tuple(labels.shape)} and logits "
            f"{tuple(logits.shape)}; the shapes do not match. Move the classes to the last dimension, or override compute_loss."
        )
    return F.cross_entropy(
        logits.flatten(0, -2),
        labels.flatten(),
        ignore_index=IGNORED,
        label_smoothing=smoothing,
    )
