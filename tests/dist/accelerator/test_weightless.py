"""backward(weight=0) contributes exactly zero, whatever the loss over nothing is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten import Accelerator
from hasten.optim.gradients import zero_if_weightless
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

Loss = Callable[[Tensor, Tensor], Tensor]

LOSSES: dict[str, Loss] = {
    "divided": lambda out, mask: (out.pow(2).mean(1) * mask).sum() / mask.sum(),
    "indexed": lambda out, mask: out[mask.bool()].pow(2).mean(),
    "ignored": lambda out, mask: nn.functional.cross_entropy(
        out,
        torch.where(
            mask.bool(),
            torch.zeros(len(out), dtype=torch.long),
            torch.full((len(out),), -100),
        ),
    ),
    "deep": lambda out, mask: (
        (((out / mask.sum()).pow(2).mean(1) * mask).sum() / mask.sum()).sqrt().exp()
    ),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@ranks(1, 2, exhaustive=(3,))
@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_a_mean_over_nothing_adds_exactly_nothing(
    ctx: ProcessContext, strategy: str
) -> None:
    """Rank 0 has samples in the first micro-step only; every other part is a mean over nothing."""
    for name, loss_of in LOSSES.items():
        for every in (1, 2):
            accelerator = Accelerator(
                gradient_accumulation_steps=every, strategy=strategy
            )
            model = net()
            model, optimizer = accelerator.prepare(
                model, torch.optim.SGD(model.parameters(), lr=0.1)
            )
            x = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))
            for micro in range(every):
                counts = micro == 0 and ctx.world.rank == 0
                mask = torch.ones(3) if counts else torch.zeros(3)
                with accelerator.accumulate(model):
                    loss = loss_of(model(x), mask)
                    assert bool(loss.isfinite()) == counts, name
                    accelerator.backward(
                        loss, weight=mask.sum() if micro else int(mask.sum())
                    )
                    optimizer.step()
            reference = net()
            torch.autograd.backward(loss_of(reference(x), torch.ones(3)))
            for parameter, reference_parameter in zip(
                accelerator.unwrap_model(model).parameters(),
                reference.parameters(),
                strict=True,
            ):
                grad: Any = parameter.grad  # Any: a tensor or a shard
                grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                torch.testing.assert_close(
                    grad,
                    reference_parameter.grad,
                    rtol=1e-6,
                    atol=1e-7,
                    msg=f"{name} {every} {{}}".format,
                )


class Tempered(nn.Module):
    """A network with a scalar, whose gradient FSDP2 does not reduce itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.temperature = net(), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.temperature  # type: ignore[no-any-return]


@ranks(2, exhaustive=(1, 3))
@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_a_rank_without_weight_gets_the_others_gradient_of_a_scalar(
    ctx: ProcessContext, strategy: str
) -> None:
    for name, loss_of in LOSSES.items():
        accelerator = Accelerator(strategy=strategy)
        model, x = (
            Tempered(),
            torch.randn(3, 3, generator=torch.Generator().manual_seed(1)),
        )
        reference = copy.deepcopy(model)
        model, optimizer = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1)
        )
        mask = torch.full((3,), float(ctx.rank == 0))
        accelerator.backward(loss_of(model(x), mask), weight=mask.sum())
        optimizer.step()
        torch.autograd.backward(loss_of(reference(x), torch.ones(3)))
        actual_grad = accelerator.unwrap_model(model).temperature.grad
        torch.testing.assert_close(
            actual_grad,
            reference.temperature.grad,
            rtol=1e-6,
            atol=1e-7,
            msg=f"{name} {{}}".format,
        )


@ranks(1)
def test_hooks_last_for_one_backward(ctx: ProcessContext) -> None:
    weight = nn.Parameter(torch.ones(2))
    loss = weight.sum() / 0.0
    with zero_if_weightless(loss, 0):
        torch.autograd.backward(loss)
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros(2))
    torch.autograd.backward(weight.sum())
    assert torch.equal(weight.grad, torch.ones(2))
    with pytest.raises(KeyError), zero_if_weightless(weight.sum(), 0):
        raise KeyError
    torch.autograd.backward(weight.sum())
    assert torch.equal(weight.grad, torch.full((2,), 2.0))
