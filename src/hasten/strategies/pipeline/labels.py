"""Weights of micro-batches whose losses are means over different numbers of labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from hasten import trees
from hasten.errors import StepError
from hasten.optim.window import Number
from hasten.trees import Tree

WeightOf = Callable[[Tree], Number]
"""Returns the number of tokens or samples that the mean loss of a batch averages over."""
_IGNORED: Final = -100
"""Label that losses of torch and transformers leave out."""


def refuse_unweighted(batch: Tree) -> None:
    """Raise StepError if the batch has ignored labels, whose number differs between micro-batches."""
    for tensor in trees.tensors(batch):
        if tensor.dtype == torch.int64 and bool((tensor == _IGNORED).any()):
            raise StepError(
                f"the batch has labels of {_IGNORED}, which a loss leaves out, so that its micro-batches average over different numbers of "
                "labels; with equal weights the loss would not be that of the whole batch. Pass the number of labels of each micro-batch: "
                "forward_backward(model, batch, loss_of, weight=lambda batch: (batch['labels'] != -100).sum())."
            )


def shares(amounts: list[Number], device: torch.device) -> list[Tensor]:
    """Return each amount divided by their sum, zero where the sum is zero."""
    stacked = torch.stack(
        [torch.as_tensor(amount, dtype=torch.float64).to(device, torch.float32) for amount in amounts]
    )
    total = stacked.sum()
    return list(torch.where(total == 0, total, stacked / total.clamp(min=torch.finfo(torch.float32).tiny)))
