"""A loss that counts for one of several equal parts: divided, or backpropagated without a division of its own."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def divided(loss: Tensor, parts: int) -> Tensor:
    """The loss divided by the number of parts."""
    return loss if parts == 1 else loss / parts


def backpropagate(loss: Tensor, parts: int = 1, **kwargs: Any) -> None:  # Any: torch's own keywords
    """Backpropagate the loss divided by `parts`; `kwargs` are passed to `Tensor.backward`.

    A backward of `loss / parts` begins with the gradient 1 and makes 1 / parts of it. Beginning there saves the division and its
    backward, which a small micro-step on a GPU would feel; the gradients are the same to the last bit.
    """
    if parts != 1:
        if type(loss) is Tensor and loss.numel() == 1 and kwargs.get("gradient") is None:
            kwargs["gradient"] = torch.full_like(loss, _share(parts, loss.dtype))
        else:
            loss = loss / parts
    loss.backward(**kwargs)  # type: ignore[no-untyped-call]  # torch leaves it untyped


@lru_cache(maxsize=64)  # asked for in every micro-step, and the same few numbers come again
def _share(parts: int, dtype: torch.dtype) -> float:
    """One divided by the number of parts, rounded as a tensor of this type rounds it."""
    return float((torch.ones((), dtype=dtype) / parts).item())
