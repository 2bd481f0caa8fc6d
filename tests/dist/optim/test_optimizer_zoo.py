"""Every optimizer of torch, over even, uneven and scalar parameters, under DDP and FSDP2, against plain torch.

The reference trains float32 weights on all ranks' samples with the same compute dtype by autocast. Tolerances: float32
differs by the order of sums; the learning rate bounds what an element can differ by when a rounding of its gradient
changes a sign (Adam-like optimizers divide by it), so half precision is compared by the loss curve.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hasten import Accelerator, GradScalerKwargs
from hasten.errors import PrepareError, StepError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

STEPS = 4
Make = Callable[..., torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": partial(torch.optim.SGD, lr=0.05),
    "SGD-momentum": partial(
        torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01
    ),
    "SGD-nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": partial(torch.optim.Adam, lr=0.02, eps=1e-4),
    "AdamW": partial(torch.optim.AdamW, lr=0.02, eps=1e-4, amsgrad=True),
    "Adamax": partial(torch.optim.Adamax, lr=0.02, eps=1e-4),
    "NAdam": partial(torch.optim.NAdam, lr=0.02, eps=1e-4),
    "RAdam": partial(torch.optim.RAdam, lr=0.02, eps=1e-4),
    "RMSprop": partial(
        torch.optim.RMSprop, lr=0.01, eps=1e-3, momentum=0.5, centered=True
    ),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05, eps=1e-4),
    "Adadelta": partial(torch.optim.Adadelta, lr=1.0, eps=1e-4),
    "ASGD": partial(torch.optim.ASGD, lr=0.05),
    "Rprop": partial(torch.optim.Rprop, lr=0.01),
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
    accelerator = Accelerator(
        kwargs_handlers=[GradScalerKwargs(init_scale=64.0)], **settings
    )
    net = Net(kind)
    net, optimizer = accelerator.prepare(net, make(net.parameters()))
    losses = []
    for step in range(STEPS):
        rank_rows = data(step).chunk(accelerator.num_processes)[
            accelerator.process_index
        ]
        loss = (net(rank_rows).float() - 1).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        assert not accelerator.optimizer_step_was_skipped
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses, accelerator.unwrap_model(net)


def check(name: str, kind: str, precision: str, strategy: str) -> None:
    make = OPTIMIZERS[name]
    expected, net = reference(make, kind, precision)
    actual_losses, model = ours(
        make, kind, strategy=strategy, mixed_precision=precision
    )
    description = f"{name} {kind} {strategy} {precision}"
    # Muon computes its direction in bfloat16
    coarse = precision != "no" or name == "Muon"
    tolerance = {"no": 2e-2 if coarse else 1e-5, "bf16": 5e-2, "fp16": 2e-2}[precision]
    torch.testing.assert_close(
        torch.tensor(actual_losses),
        torch.tensor(expected),
        rtol=tolerance,
        atol=tolerance,
        msg=description,
    )
    if not coarse:
        for a, b in zip(model.parameters(), net.parameters(), strict=True):
            full_parameter = a.full_tensor() if hasattr(a, "full_tensor") else a
            torch.testing.assert_close(
                full_parameter.detach(),
                b.detach(),
                rtol=0,
                atol=2e-5,
                msg=lambda t: f"{description}: {t}",
            )


CASES = [
    (name, kind, precision)
    for name in OPTIMIZERS
    for kind in (("matrices",) if name == "Muon" else ("even", "uneven", "scalar"))
    for precision in ("no", "bf16", "fp16")
]


@ranks(2, exhaustive=(3,))
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_optimizers_train_as_in_plain_torch(ctx: ProcessContext, strategy: str) -> None:
    """A sample of the cases below, another one for every number of ranks and strategy."""
    for case in random.Random(len(strategy) + 10 * ctx.world.size).sample(CASES, 12):
        check(*case, strategy)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@ranks(2, 3, timeout_s=600)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_every_optimizer_trains_as_in_plain_torch(
    ctx: ProcessContext, strategy: str
) -> None:
    for case in CASES:
        check(*case, strategy)


class Foreign(torch.optim.Optimizer):
    """Somebody's optimizer, with an operation that sharded tensors lack."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.zeros(parameter.shape))


@ranks(2)
def test_optimizers_that_cannot_update_shards_are_refused_in_one_sentence(
    ctx: ProcessContext,
) -> None:
    cases: list[tuple[Make, str, str]] = [
        (
            partial(torch.optim.LBFGS, lr=0.1),
            "uneven",
            r"LBFGS computes with whole parameters,.* strategy='ddp'",
        ),
        (
            partial(torch.optim.Adafactor, lr=0.1),
            "scalar",
            r"Adafactor computes with whole parameters,.* strategy='ddp'",
        ),
    ]
    for make, kind, words in cases:
        net = Net(kind)
        with pytest.raises(PrepareError, match=words):
            Accelerator(strategy="fsdp").prepare(net, make(net.parameters()))
        net = Net(kind)
        Accelerator(strategy="ddp").prepare(net, make(net.parameters()))
    accelerator = Accelerator(strategy="fsdp")
    net = Net("even")
    net, optimizer = accelerator.prepare(net, Foreign(net.parameters()))
    accelerator.backward(net(data(0)).mean())
    with pytest.raises(StepError, match="Foreign cannot update sharded parameters"):
        optimizer.step()


@ranks(2)
@pytest.mark.parametrize("decay", [None, 0.9])
def test_averaged_models_are_prepared_with_their_model(
    ctx: ProcessContext, decay: float | None
) -> None:
    average: Any = None if decay is None else get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    make = partial(AveragedModel, multi_avg_fn=average)
    reference = Net("even")
    plain, mean = torch.optim.SGD(reference.parameters(), lr=0.1), make(reference)
    accelerator = Accelerator(strategy="fsdp")
    net = Net("even")
    net, optimizer, averaged = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), make(net)
    )
    for step in range(3):
        accelerator.backward(
            (net(data(step).chunk(2)[ctx.world.rank]) - 1).pow(2).mean()
        )
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(net)
        torch.autograd.backward((reference(data(step)) - 1).pow(2).mean())
        plain.step()
        plain.zero_grad()
        mean.update_parameters(reference)
    with torch.no_grad():
        torch.testing.assert_close(averaged(data(9)), mean(data(9)), rtol=0, atol=1e-6)


@ranks(1, 2)
def test_an_averaged_model_that_was_left_out_is_refused(ctx: ProcessContext) -> None:
    net = Net("even")
    left_out = AveragedModel(net)
    net = Accelerator(strategy="fsdp").prepare(net)
    # torch's error
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
        left_out.update_parameters(net)
    plain = Net("even")
    AveragedModel(plain).update_parameters(plain)


@ranks(1, 2)
def test_a_scalar_does_not_switch_off_the_fast_update(ctx: ProcessContext) -> None:
    """The kernels see plain tensors only, also in the group of a parameter that stays whole."""
    for make in (OPTIMIZERS["AdamW"], OPTIMIZERS["SGD-momentum"]):
        accelerator = Accelerator(strategy="fsdp")
        net = Net("scalar")
        net, optimizer = accelerator.prepare(net, make(net.parameters()))
        kernel_types: list[type] = []
        collect = optimizer.optimizer._init_group

        def noted(
            group: Any,
            *lists: Any,
            collect: Any = collect,
            kernel_types: list[type] = kernel_types,
        ) -> Any:
            collected = collect(group, *lists)
            kernel_types.extend(
                type(value) for values in lists for value in values if value is not None
            )
            return collected

        optimizer.optimizer._init_group = noted
        for step in range(2):
            accelerator.backward(net(data(step)).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        assert kernel_types
        assert DTensor not in kernel_types
        state_tensors = [
            v
            for values in optimizer.state.values()
            for v in values.values()
            if isinstance(v, Tensor) and v.ndim
        ]
        assert all(isinstance(value, DTensor) for value in state_tensors), (
            "state stays spread"
        )
        assert set(optimizer.state) == set(accelerator.unwrap_model(net).parameters())
