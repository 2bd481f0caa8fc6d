"""Every optimizer of torch, over even, uneven and scalar parameters, under DDP and FSDP2, against plain torch.

The reference trains float32 weights on all ranks' samples with the same compute dtype by autocast. Tolerances: float32
differs by the order of sums; the learning rate bounds what an element can differ by when a rounding of its gradient
changes a sign (Adam-like optimizers divide by it), so half precision is compared by the loss curve.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten import Accelerator, GradScalerKwargs
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

STEPS = 4
Make = Callable[..., torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": partial(torch.optim.SGD, lr=0.05),
    "SGD-momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "SGD-nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": partial(torch.optim.Adam, lr=0.02, eps=1e-4),
    "AdamW": partial(torch.optim.AdamW, lr=0.02, eps=1e-4, amsgrad=True),
    "Adamax": partial(torch.optim.Adamax, lr=0.02, eps=1e-4),
    "NAdam": partial(torch.optim.NAdam, lr=0.02, eps=1e-4),
    "RAdam": partial(torch.optim.RAdam, lr=0.02, eps=1e-4),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, eps=1e-3, momentum=0.5, centered=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05, eps=1e-4),
    "Adadelta": partial(torch.optim.Adadelta, lr=1.0, eps=1e-4),
    "ASGD": partial(torch.optim.ASGD, lr=0.05),
    "Rprop": partial(torch.optim.Rprop, lr=0.01),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.02),
    "Muon": partial(torch.optim.Muon, lr=0.02),
}


class Net(nn.Module):
    """Parameters that two and three ranks share evenly and not, and a scalar in the same group."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        wide = 7 if kind == "uneven" else 6
        self.first = nn.Linear(6, wide, bias=kind != "matrices")
        self.second = nn.Linear(wide, 6, bias=kind != "matrices")
        self.scale = nn.Parameter(torch.tensor(1.5)) if kind == "scalar" else None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out if self.scale is None else out * self.scale


def data(step: int) -> Tensor:
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(step))


def reference(make: Make, kind: str, precision: str) -> tuple[list[float], nn.Module]:
    net = Net(kind)
    optimizer = make(net.parameters())
    losses = []
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    for step in range(STEPS):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            out = net(data(step))
        loss = (out.float() - 1).pow(2).mean()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, net


def ours(make: Make, kind: str, **settings: Any) -> tuple[list[float], nn.Module]:
    accelerator = Accelerator(kwargs_handlers=[GradScalerKwargs(init_scale=64.0)], **settings)
    net = Net(kind)
    net, optimizer = accelerator.prepare(net, make(net.parameters()))
    losses = []
    for step in range(STEPS):
        mine = data(step).chunk(accelerator.num_processes)[accelerator.process_index]
        loss = (net(mine).float() - 1).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        assert not accelerator.optimizer_step_was_skipped
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses, accelerator.unwrap_model(net)


def check(name: str, kind: str, strategy: str, precision: str) -> None:
    make = OPTIMIZERS[name]
    expected, net = reference(make, kind, precision)
    got, model = ours(make, kind, strategy=strategy, mixed_precision=precision)
    what = f"{name} {kind} {strategy} {precision}"
    tolerance = {"no": 1e-5, "bf16": 5e-2, "fp16": 1e-2}[precision]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=tolerance, atol=tolerance, msg=what)
    if precision == "no":
        for a, b in zip(model.parameters(), net.parameters(), strict=True):
            whole = a.full_tensor() if hasattr(a, "full_tensor") else a
            torch.testing.assert_close(whole.detach(), b.detach(), rtol=0, atol=2e-5, msg=lambda t: f"{what}: {t}")


@ranks(2, 3)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_every_optimizer_trains_as_in_plain_torch(ctx: ProcessContext, strategy: str) -> None:
    for name in OPTIMIZERS:
        for kind in ("even", "uneven", "scalar") if name != "Muon" else ("matrices",):
            for precision in ("no", "bf16", "fp16"):
                try:
                    check(name, kind, strategy, precision)
                except Exception as e:
                    if ctx.world.rank == 0: open("/tmp/st/zoo.txt","a").write(f"{ctx.world.size} {name} {kind} {strategy} {precision} {type(e).__name__}: {str(e)[:300]!r}\n")
