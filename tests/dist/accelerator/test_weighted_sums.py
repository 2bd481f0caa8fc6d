"""Several weighted backward()s in one micro-step are a sum of losses, each the mean over its own total weight."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from hasten import Accelerator, GradientAccumulationPlugin, GradScalerKwargs
from hasten.errors import StepError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

WINDOWS = 3


class Heads(nn.Module):
    """A trunk and several heads: every loss reaches the trunk and one head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(3, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(heads))

    def forward(self, x: Tensor, head: int) -> Tensor:
        out: Tensor = self.heads[head](torch.tanh(self.trunk(x)))
        # Every parameter takes part, so that DDP need not look for unused ones.
        return out + 0.0 * sum(p.sum() for p in self.heads.parameters())


def batch(window: int, micro: int, head: int, rank: int, rows: int) -> Tensor:
    seed = ((window * 10 + micro) * 10 + head) * 10 + rank
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, x: Tensor, head: int) -> Tensor:
    loss: Tensor = (
        (model(x, head) - x[:, :2]).pow(2).sum() / len(x)
        if len(x)
        else model(x.new_zeros(1, 3), head).sum()
    )
    return loss


def run(
    ctx: ProcessContext,
    heads: int,
    every: int,
    seed: int,
    tensors: bool,
    **options: object,
) -> None:
    rng = random.Random(seed)
    size = ctx.world.size
    rows = {
        (w, m, h, r): rng.choice([0, 1, 2, 5]) + (m == 0)
        for w in range(WINDOWS)
        for m in range(every)
        for h in range(heads)
        for r in range(size)
    }
    plugin = options.pop("plugin", None) or GradientAccumulationPlugin(num_steps=every)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin, **options)  # type: ignore[arg-type]
    model = Heads(heads)
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    )
    reference = Heads(heads)
    plain = torch.optim.SGD(reference.parameters(), lr=0.2, momentum=0.5)
    for window in range(WINDOWS):
        for micro in range(every):
            with accelerator.accumulate(model):
                for head in range(heads):
                    count = rows[window, micro, head, ctx.world.rank]
                    loss = loss_of(
                        model, batch(window, micro, head, ctx.world.rank, count), head
                    )
                    accelerator.backward(
                        loss, weight=torch.tensor(count) if tensors else count
                    )
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        for head in range(heads):
            rank_batches = [
                batch(window, m, head, r, rows[window, m, head, r])
                for m in range(every)
                for r in range(size)
            ]
            torch.autograd.backward(loss_of(reference, torch.cat(rank_batches), head))
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        plain.step()
        plain.zero_grad()
        assert norm is not None
        tolerance = 1e-2 if options.get("mixed_precision") == "fp16" else 2e-6
        torch.testing.assert_close(norm, expected, rtol=tolerance, atol=tolerance)
        for parameter, reference_parameter in zip(
            accelerator.unwrap_model(model).parameters(),
            reference.parameters(),
            strict=True,
        ):
            full_parameter = (
                parameter.full_tensor()
                if hasattr(parameter, "full_tensor")
                else parameter
            )
            torch.testing.assert_close(
                full_parameter.detach(),
                reference_parameter.detach(),
                rtol=0,
                atol=tolerance,
            )


@ranks(2, exhaustive=(1, 3))
@pytest.mark.parametrize(
    "strategy", ["auto", pytest.param("fsdp", marks=pytest.mark.exhaustive)]
)
def test_each_loss_is_divided_by_its_own_weight(
    ctx: ProcessContext, strategy: str
) -> None:
    for heads in (1, 2, 3):
        for every in (1, 2, 3):
            refused = (
                pytest.raises(StepError, match="Add the losses before backward")
                if min(heads, every) > 1
                else nullcontext()
            )
            with refused:
                run(
                    ctx,
                    heads,
                    every,
                    seed=10 * heads + every,
                    tensors=every == 2,
                    strategy=strategy,
                )


@ranks(1, 2)
def test_fp16_keeps_the_losses_apart_too(ctx: ProcessContext) -> None:
    small = GradScalerKwargs(init_scale=256.0)
    run(
        ctx, 2, 1, seed=1, tensors=True, mixed_precision="fp16", kwargs_handlers=[small]
    )


@ranks(1, 2)
def test_without_accumulate_the_losses_of_one_update_are_summed(
    ctx: ProcessContext,
) -> None:
    accelerator = Accelerator()
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.0)
    )
    for weight in (3, 5):  # two losses, each one the mean over all ranks
        accelerator.backward(
            model(torch.tensor([[float(weight)]])).sum(), weight=weight + ctx.world.rank
        )
    optimizer.step()
    torch.testing.assert_close(next(model.parameters()).grad, torch.tensor([[8.0]]))
