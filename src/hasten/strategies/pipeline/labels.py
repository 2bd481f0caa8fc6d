"""Weights of micro-batches whose losses are means over different numbers of labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hasten import trees
from hasten.errors import StepError
from hasten.optim.window import Number
from hasten.trees import Tree

WeightOf = Callable[[Tree], Number]
"""Returns the number of tokens or samples that the mean loss of a batch averages over."""
_LOSSES: Final = (F.cross_entropy, F.nll_loss)
_SAY: Final = (
    "Pass the number of labels of each micro-batch: forward_backward(model, batch, loss_of, weight=lambda batch: "
    "(batch['labels'] != -100).sum())"
)


@dataclass(frozen=True, slots=True)
class Counted:
    """Labels of a batch that its loss averages over."""

    index: int
    """Index of the labels among the tensors of the batch."""
    shifted: bool
    """Each label is predicted from the previous token, so the first label of each row is not used."""
    ignored: int
    """Label that the loss ignores."""

    def of(self, micro: Tree) -> Tensor:
        """Return the number of labels that the loss averages over, on their device."""
        labels = trees.tensors(micro)[self.index]
        return ((labels[:, 1:] if self.shifted else labels) != self.ignored).sum()


class WatchLosses(TorchFunctionMode):
    """Torch function mode that records calls of torch's cross entropies."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor, int, bool]] = []
        """Targets, loss, ignored label, and whether the loss is a plain mean (without class weights or soft targets)."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # Any: functions of torch
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if func in _LOSSES and isinstance(made, Tensor):
            given = dict(zip(("input", "target", "weight"), args, strict=False)) | kwargs
            target, mean = given["target"], given.get("reduction", "mean") == "mean"
            alike = given.get("weight") is None and not target.is_floating_point()
            if mean and made.ndim == 0:
                self.seen.append((target.detach(), made.detach(), given.get("ignore_index", -100), alike))
        return made

    def counted(self, loss: Tensor, micro: Tree) -> Counted | None:
        """Return the labels of this micro-batch that its loss averages over; None if all samples have equal weight.

        Raises: StepError for a mean over some labels that are not found in the batch.
        """
        labels = [(target, ignored) for target, _, ignored, alike in self.seen if alike]
        uneven = len(labels) < len(self.seen) or any(bool((target == ignored).any()) for target, ignored in labels)
        found = [_find(target, micro, ignored) for target, ignored in labels]
        same = len(self.seen) == 1 and torch.allclose(self.seen[0][1].float(), loss.detach().float().reshape(()))
        if same and found and found[0] is not None:
            return found[0]
        if uneven:
            raise StepError(
                "loss_of is a mean over labels of which some are ignored, and micro-batches would have equal weight although their "
                f"numbers of labels differ, so the loss would not be that of the whole batch. {_SAY}."
            )
        return None


def _find(target: Tensor, micro: Tree, ignored: int) -> Counted | None:
    """Return the tensor of the batch that equals the targets, unchanged or shifted by one position."""
    for index, tensor in enumerate(trees.tensors(micro)):
        if tensor.dtype != target.dtype or tensor.ndim == 0:
            continue
        if _equal(tensor, target):
            return Counted(index, False, ignored)
        if tensor.ndim == 2 and (
            _equal(tensor[:, 1:], target) or _equal(F.pad(tensor[:, 1:], (0, 1), value=ignored), target)
        ):
            return Counted(index, True, ignored)
    return None


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.numel() == b.numel() and bool((a.reshape(-1).to(b.device) == b.reshape(-1)).all())


def shares(amounts: list[Number], device: torch.device) -> list[Tensor]:
    """Return each amount divided by their sum, zero where the sum is zero."""
    every = torch.stack([torch.as_tensor(one, dtype=torch.float64).to(device, torch.float32) for one in amounts])
    total = every.sum()
    return list(torch.where(total == 0, total, every / total.clamp(min=torch.finfo(torch.float32).tiny)))
