"""One rule for the weights of a model loaded in half precision, on one process, under DDP and under FSDP2."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten import Accelerator, GradScalerKwargs
from hasten.errors import PrecisionError, PrepareError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Net(nn.Module):
    """A learned temperature beside linear layers, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.frozen, self.last = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 2),
        )
        self.frozen.requires_grad_(False)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (
            self.last(torch.tanh(self.frozen(self.first(x)))) * self.temperature
        )
        return out


def x(step: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(step))


# Any: the model that came back, with its own fields
def train(net: nn.Module, lr: float, **settings: Any) -> Any:
    accelerator = Accelerator(
        kwargs_handlers=[GradScalerKwargs(init_scale=64.0)], **settings
    )
    model, optimizer = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0)
    )
    for step in range(20):
        rank_rows = x(step).chunk(accelerator.num_processes)[accelerator.process_index]
        if settings.get("mixed_precision") is None:
            rank_rows = rank_rows.to(torch.bfloat16)
        accelerator.backward((model(rank_rows).float() - 1).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.unwrap_model(model)


def whole(parameter: Tensor) -> Tensor:
    return (
        parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    ).detach()


@ranks(1, 2)
@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_half_precision_weights_are_trained_in_float32(
    ctx: ProcessContext, strategy: str
) -> None:
    """Steps of 1e-4 vanish in bfloat16 weights of about 1; with masters they add up, for scalars too."""
    for precision, dtype in HALF.items():
        net = Net().to(dtype)
        initial_weights = {
            name: p.detach().float().clone() for name, p in net.named_parameters()
        }
        model = train(net, 1e-4, mixed_precision=precision, strategy=strategy)
        for name, parameter in model.named_parameters():
            if name.startswith("frozen"):
                assert parameter.dtype == dtype
            else:
                assert parameter.dtype == torch.float32, (name, strategy)
                assert (whole(parameter) - initial_weights[name]).abs().max() > 5e-4, (
                    name,
                    precision,
                    strategy,
                )


@ranks(1, 2)
@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_keep_leaves_weights_as_they_are(ctx: ProcessContext, strategy: str) -> None:
    model = train(
        Net().to(torch.bfloat16),
        1e-4,
        mixed_precision="bf16",
        master_weights="keep",
        strategy=strategy,
    )
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert whole(model.temperature).item() == 1.0, (
        "an update of 1e-4 is lost in bfloat16"
    )
    half = Net().half()
    with pytest.raises(PrecisionError, match="is float16 and trainable"):
        Accelerator(
            mixed_precision="fp16", master_weights="keep", strategy=strategy
        ).prepare(half)


@ranks(1, 2)
@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_without_mixed_precision_and_in_evaluation_nothing_is_cast(
    ctx: ProcessContext, strategy: str
) -> None:
    model = train(Net().to(torch.bfloat16), 1e-4, strategy=strategy)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    accelerator = Accelerator(mixed_precision="bf16", strategy=strategy)
    shown = accelerator.prepare_model(Net().to(torch.bfloat16), evaluation_mode=True)
    assert {parameter.dtype for parameter in shown.parameters()} == {torch.bfloat16}


@ranks(1, 2)
def test_strategies_agree_on_a_model_loaded_in_half_precision(
    ctx: ProcessContext,
) -> None:
    results = []
    for strategy in ("auto", "fsdp"):
        model = train(
            Net().to(torch.bfloat16), 1e-2, mixed_precision="bf16", strategy=strategy
        )
        results.append([whole(parameter).float() for parameter in model.parameters()])
    for a, b in zip(*results, strict=True):
        # 20 steps of 1e-2, compute in bfloat16
        torch.testing.assert_close(a, b, rtol=0, atol=0.02)


@ranks(1, 2)
@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_optimizer_state_follows_its_weights(
    ctx: ProcessContext, strategy: str
) -> None:
    """An optimizer that has already trained bfloat16 weights goes on with float32 masters and moments."""
    model = Net().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.autograd.backward(model(x(0).to(torch.bfloat16)).float().pow(2).mean())
    optimizer.step()
    accelerator = Accelerator(mixed_precision="bf16", strategy=strategy)
    model, optimizer = accelerator.prepare(model, optimizer)
    optimizer.zero_grad()
    accelerator.backward(model(x(1)).float().pow(2).mean())
    optimizer.step()
    for parameter, values in optimizer.state.items():
        assert values["exp_avg"].dtype == parameter.dtype == torch.float32


@ranks(1)
def test_the_log_names_the_rule(ctx: ProcessContext) -> None:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Keep()
    logger = logging.getLogger("hasten")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        accelerator = Accelerator(mixed_precision="bf16")
        accelerator.prepare(Net().to(torch.bfloat16))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert any(
        "5 bfloat16 parameters are trained as float32 master weights" in line
        for line in lines
    )


@ranks(1, 2)
def test_hooks_on_gradients_are_called_or_refused(ctx: ProcessContext) -> None:
    model = Net()
    model.first.weight.register_hook(lambda grad: grad * 2)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    with pytest.raises(
        PrepareError, match=r"'first.weight' has a hook set with register_hook\(\)"
    ):
        Accelerator(strategy="fsdp").prepare(model)
    model = Net()
    model.first.weight.register_post_accumulate_grad_hook(print)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    with pytest.raises(
        PrepareError, match=r"hook set before prepare\(\).*on the prepared model"
    ):
        Accelerator(strategy="fsdp").prepare(model)
    model = Net()
    called: list[str] = []

    def halve(parameter: Tensor) -> None:
        called.append("post")
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    # A scalar stays whole, and so does its hook.
    model.temperature.register_hook(lambda grad: grad * 3)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    accelerator = Accelerator(strategy="fsdp")
    prepared = accelerator.prepare(model)
    weight = accelerator.unwrap_model(prepared).get_parameter("first.weight")
    weight.register_post_accumulate_grad_hook(halve)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    accelerator.backward(
        prepared(x(0).chunk(ctx.world.size)[ctx.world.rank]).pow(2).mean()
    )
    reference = Net()
    torch.autograd.backward(reference(x(0)).pow(2).mean())
    assert called == ["post"]
    with pytest.raises(
        PrepareError,
        match=r"register_hook\(.*sharded parameter.*register_post_accumulate_grad_hook",
    ):
        accelerator.unwrap_model(prepared).get_parameter("first.bias").register_hook(
            halve
        )  # type: ignore[no-untyped-call]  # torch leaves it untyped
    parameters = dict(accelerator.unwrap_model(prepared).named_parameters())
    for name, factor in (
        ("first.weight", 0.5),
        ("first.bias", 1.0),
        ("temperature", 3.0),
    ):
        grad, expected = parameters[name].grad, reference.get_parameter(name).grad
        assert grad is not None
        assert expected is not None
        torch.testing.assert_close(whole(grad), expected * factor, msg=name)
