"""An optimizer over a part of the parameters, clipped over all of them: as in plain torch, on every strategy.

`optimizer.zero_grad()` clears the gradients of its own parameters only. Those of the others stay, add up from step to step, and count
in the norm of `clip_grad_norm_(model.parameters())`, which scales them too.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from hasten import Accelerator, GradScalerKwargs
from hasten.config.sections.parallel import ParallelismConfig
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


def weight(step: int) -> float:
    return 1.0 + step % 3


def plain(every: int, weighted: bool) -> tuple[list[float], list[Tensor]]:
    """Norms and weights of plain torch."""
    net = model()
    optimizer = torch.optim.AdamW(part_of(net), lr=1e-2)
    norms = []
    for first in range(0, STEPS, every):
        steps = range(first, min(first + every, STEPS))
        shares = torch.tensor(
            [weight(step) if weighted else 1.0 for step in steps], dtype=torch.float64
        )
        losses = torch.stack(
            [next_token_loss(net(tokens(step)), tokens(step)) for step in steps]
        )
        (losses * shares / shares.sum()).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), LIMIT)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, [p.detach() for p in net.parameters()]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@ranks(2, exhaustive=(1,))
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize(
    ("every", "weighted"), [(1, False), (1, True), (2, False), (2, True)]
)
def test_unowned_gradients_stay_and_count(
    ctx: ProcessContext, layout: str, every: int, weighted: bool
) -> None:
    """Five batches: with windows of two the last one ends early, and its gradients are corrected, not those before it."""
    if ctx.world.size == 1 and layout == "tp":
        return
    accelerator = Accelerator(gradient_accumulation_steps=every, **LAYOUTS[layout])
    net = model()
    copies = 1 if layout == "tp" else ctx.world.size
    steps: Any = torch.arange(STEPS).repeat_interleave(copies)
    loader: Any = DataLoader(steps, batch_size=1)
    net, optimizer, loader = accelerator.prepare(
        net, torch.optim.AdamW(part_of(net), lr=1e-2), loader
    )
    norms = []
    for step in loader:
        mine = tokens(int(step))
        if layout != "tp":
            mine = mine.chunk(ctx.world.size)[ctx.rank]
        with accelerator.accumulate(net):
            counted = {"weight": weight(int(step))} if weighted else {}
            accelerator.backward(next_token_loss(net(mine), mine), **counted)
            norm = accelerator.clip_grad_norm_(net.parameters(), LIMIT)
            if norm is not None:
                norms.append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
    expected, weights = plain(every, weighted)
    assert norms == pytest.approx(expected, abs=1e-9)
    for got, want in zip(
        accelerator.unwrap_model(net).parameters(), weights, strict=True
    ):
        torch.testing.assert_close(whole(got.detach()), want, rtol=0, atol=1e-9)


@ranks(2)
def test_a_skipped_update_leaves_nothing_in_unowned_gradients(
    ctx: ProcessContext,
) -> None:
    scaling = GradScalerKwargs(init_scale=2.0**4)
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[scaling])
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    net, optimizer = accelerator.prepare(
        net, torch.optim.SGD(net[1].parameters(), lr=0.0)
    )
    first = next(accelerator.unwrap_model(net).parameters())
    kept = []
    for factor in (1.0, math.inf, 1.0):
        accelerator.backward((net(torch.ones(2, 4)) * factor).mean())
        optimizer.step()
        assert first.grad is not None
        kept.append(first.grad.clone())
        optimizer.zero_grad()
    assert torch.equal(kept[0], kept[1])
    torch.testing.assert_close(kept[2], 2 * kept[0])
