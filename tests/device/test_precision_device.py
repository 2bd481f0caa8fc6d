"""Precisions, accumulation and clipping on a real accelerator, against plain torch on the same device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hasten.accelerator.facade import Accelerator
from hasten.config.sections.loop import FP8Config
from hasten.optional import available
from hasten.precision.build import build_precision, supported_half_precisions

pytestmark = pytest.mark.device


def device() -> torch.device:
    current_device = torch.accelerator.current_accelerator()
    assert current_device is not None
    return current_device


@pytest.fixture(scope="module", autouse=True)
def warm_up_device() -> None:
    """The driver's handles and the compiler's workers stay for the life of the process; they are no test's leak."""
    if torch.accelerator.is_available():
        torch.compile(lambda x: x.sin() + 1)(torch.zeros(2, device=device()))


def toy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16)
    )


def batch(seed: int, rows: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (
        torch.randn(rows, 32, generator=generator),
        torch.randint(16, (rows,), generator=generator),
    )
    return x.to(device()), y.to(device())


@pytest.mark.parametrize("spec", ["bf16", "fp16"])
def test_half_precision_equals_torch_by_hand(spec: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[spec]
    kind = device().type
    accelerator = Accelerator(mixed_precision=spec)
    model = toy()
    model, optimizer = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3)
    )
    plain = toy().to(device())
    by_hand = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(kind, enabled=spec == "fp16")
    for step in range(20):
        x, y = batch(step)
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.autocast(kind, dtype):
            out = plain(x)
        torch.autograd.backward(
            scaler.scale(nn.functional.cross_entropy(out.float(), y))
        )
        scaler.unscale_(by_hand)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        scaler.step(by_hand)
        scaler.update()
        by_hand.zero_grad()
    for parameter, plain_parameter in zip(
        model.parameters(), plain.parameters(), strict=True
    ):
        torch.testing.assert_close(parameter, plain_parameter, rtol=1e-5, atol=1e-6)


def test_weights_stay_on_the_device_and_equal_the_big_batch() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=3)
    model = toy()
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    plain = toy().to(device())
    shares = [batch(seed, rows) for seed, rows in ((0, 3), (1, 9), (2, 5))]
    for x, y in shares:
        with accelerator.accumulate(model):
            accelerator.backward(
                nn.functional.cross_entropy(model(x), y), weight=(y >= 0).sum()
            )
            optimizer.step()
    x, y = torch.cat([s[0] for s in shares]), torch.cat([s[1] for s in shares])
    torch.autograd.backward(nn.functional.cross_entropy(plain(x), y))
    for parameter, plain_parameter in zip(
        model.parameters(), plain.parameters(), strict=True
    ):
        torch.testing.assert_close(
            parameter.grad, plain_parameter.grad, rtol=1e-4, atol=1e-6
        )


def test_the_replaced_forward_compiles_as_one_graph() -> None:
    model = toy().to(device())
    build_precision("bf16", device()).convert(model)
    compiled = torch.compile(model, fullgraph=True)
    x, _ = batch(0)
    out = compiled(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, model(x), rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(not available("torchao"), reason="torchao is not installed")
@pytest.mark.filterwarnings("ignore")
def test_fp8_trains() -> None:
    precision = build_precision("fp8", device(), fp8=FP8Config(backend="ao"))
    model = toy().to(device())
    precision.convert(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    x, y = batch(0)
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(x), y)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_the_device_says_what_it_can() -> None:
    assert set(supported_half_precisions(device())) <= {"bf16", "fp16"}
