"""An optimizer over a part of the parameters: as in plain torch, on every strategy; only its parameters are clipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from hasten import Accelerator
from hasten.config.sections.parallel import ParallelismConfig
from hasten.errors import StepError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.testing.toys import TinyLM, next_token_loss, seeded

STEPS = 5
LIMIT = 0.3
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "tp": {"parallelism_config": ParallelismConfig(tp_size=2)},
}


def model() -> TinyLM:
    return seeded(
        lambda: TinyLM(vocab=8, width=8, heads=2, depth=2, context=4)
    ).double()


def part_of(net: nn.Module) -> list[nn.Parameter]:
    """The second half of the parameters."""
    every = list(net.parameters())
    return every[len(every) // 2 :]


def tokens(step: int) -> Tensor:
    return torch.randint(8, (8, 4), generator=torch.Generator().manual_seed(step))


def plain() -> tuple[list[float], list[Tensor]]:
    """Norms and weights of plain torch."""
    net = model()
    optimizer = torch.optim.AdamW(part_of(net), lr=1e-2)
    norms = []
    for step in range(STEPS):
        next_token_loss(net(tokens(step)), tokens(step)).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        norms.append(float(nn.utils.clip_grad_norm_(part_of(net), LIMIT)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, [p.detach() for p in net.parameters()]


def updated_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@ranks(2, exhaustive=(1,))
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_part_of_the_parameters_is_trained_as_in_plain_torch(
    ctx: ProcessContext, layout: str
) -> None:
    if ctx.world.size == 1 and layout == "tp":
        return
    accelerator = Accelerator(**LAYOUTS[layout])
    net = model()
    copies = 1 if layout == "tp" else ctx.world.size
    steps: Any = torch.arange(STEPS).repeat_interleave(copies)
    loader: Any = DataLoader(steps, batch_size=1)
    net, optimizer, loader = accelerator.prepare(
        net, torch.optim.AdamW(part_of(net), lr=1e-2), loader
    )
    norms = []
    for step in loader:
        rank_tokens = tokens(int(step))
        if layout != "tp":
            rank_tokens = rank_tokens.chunk(ctx.world.size)[ctx.rank]
        with accelerator.accumulate(net):
            accelerator.backward(next_token_loss(net(rank_tokens), rank_tokens))
            norm = accelerator.clip_grad_norm_(updated_by(optimizer), LIMIT)
            if norm is not None:
                norms.append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
    expected, weights = plain()
    assert norms == pytest.approx(expected, abs=1e-9)
    for parameter, expected_weight in zip(
        accelerator.unwrap_model(net).parameters(), weights, strict=True
    ):
        torch.testing.assert_close(
            whole(parameter.detach()), expected_weight, rtol=0, atol=1e-9
        )


def clip_both_layers(accelerator: Accelerator) -> Tensor | None:
    """Clip all parameters of a network whose optimizer holds the second layer alone."""
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    head = net[1].parameters()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(head, lr=0.0))
    accelerator.backward(net(torch.ones(2, 4)).mean())
    assert accelerator.clip_grad_norm_(updated_by(optimizer), 1e9) is not None
    return accelerator.clip_grad_norm_(net.parameters(), LIMIT)


@ranks(1, 2)
def test_parameters_without_an_optimizer_are_clipped_as_in_torch(
    ctx: ProcessContext,
) -> None:
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    net(torch.ones(2, 4)).mean().backward()
    expected_norm = nn.utils.clip_grad_norm_(net.parameters(), LIMIT)
    torch.testing.assert_close(clip_both_layers(Accelerator()), expected_norm)


@ranks(1, 2)
def test_parameters_without_an_optimizer_are_not_clipped_in_a_window(
    ctx: ProcessContext,
) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    with pytest.raises(StepError, match=r"2 of the clipped.*requires_grad_"):
        clip_both_layers(accelerator)
