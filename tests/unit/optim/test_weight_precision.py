"""Weights of losses are as exact as the model: a count in a tensor gives the gradients that the same number gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten import Accelerator

COUNTS = (7, 3, 11)


def window_gradient(dtype: torch.dtype, kind: Any) -> Tensor:
    """The gradient of a window of three micro-steps, each loss weighted."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(COUNTS))
    net = nn.Linear(5, 1).to(dtype)
    model, optimizer = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1)
    )
    for number, count in enumerate(COUNTS):
        x = torch.linspace(number, number + 1, 5, dtype=dtype)
        with accelerator.accumulate(model):
            accelerator.backward(model(x).pow(2).sum(), weight=kind(count))
            if accelerator.sync_gradients:
                # settles the window's gradients
                accelerator.clip_grad_norm_(model.parameters(), 1e9)
                assert net.weight.grad is not None
                return net.weight.grad.clone()
            optimizer.step()
    raise AssertionError("the window ends")


def plain_gradient(dtype: torch.dtype) -> Tensor:
    """The same by plain torch: the mean over everything that was counted."""
    torch.manual_seed(0)
    net = nn.Linear(5, 1).to(dtype)
    total = torch.zeros((), dtype=dtype)
    for number, count in enumerate(COUNTS):
        x = torch.linspace(number, number + 1, 5, dtype=dtype)
        total = total + net(x).pow(2).sum() * count / sum(COUNTS)
    total.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert net.weight.grad is not None
    return net.weight.grad


@pytest.mark.parametrize(
    "kind",
    [
        torch.tensor,
        lambda count: torch.tensor([count], dtype=torch.int32),
        lambda count: torch.tensor(float(count)),
        lambda count: torch.tensor(count, dtype=torch.bfloat16),
        float,
    ],
    ids=["int64", "int32", "float32", "bfloat16", "number"],
)
def test_a_float64_model_keeps_its_digits(kind: Any) -> None:
    weighted_gradient = window_gradient(torch.float64, kind)
    assert torch.equal(weighted_gradient, window_gradient(torch.float64, int))
    torch.testing.assert_close(
        weighted_gradient, plain_gradient(torch.float64), rtol=1e-14, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_of_other_types_stay_what_they_are(dtype: torch.dtype) -> None:
    weighted_gradient = window_gradient(dtype, torch.tensor)
    assert weighted_gradient.dtype == dtype
    # a product with a number is rounded to bfloat16 once more
    tolerance = 0.0 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(
        weighted_gradient, window_gradient(dtype, int), rtol=tolerance, atol=0
    )
