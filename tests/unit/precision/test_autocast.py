"""Mixed precision on the CPU: what is cast, what comes back, and that it stays one graph."""

from __future__ import annotations

import copy
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten.config.sections.loop import AutocastKwargs, GradScalerKwargs, PrecisionType
from hasten.errors import PrecisionError
from hasten.modules import forwarding
from hasten.precision.autocast import AutocastPrecision
from hasten.precision.base import Precision
from hasten.precision.build import build_precision, supported_half_precisions
from hasten.precision.scaler import LossScaler

CPU = torch.device("cpu")
HALF: list[tuple[PrecisionType, torch.dtype]] = [
    ("bf16", torch.bfloat16),
    ("fp16", torch.float16),
]
Pair = namedtuple("Pair", ["logits", "label"])


@dataclass
class Output:
    logits: Tensor
    labels: Tensor
    note: str = "kept"


class Model(nn.Module):
    """Returns what the test asks for, and remembers in which dtype it computed."""

    def __init__(self, shape: str = "tensor") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.shape = shape
        self.output_dtype: torch.dtype | None = None

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        self.output_dtype = y.dtype
        label = torch.ones(2, dtype=torch.long)
        match self.shape:
            case "tensor":
                return y
            case "dict":
                return {"a": y, "b": [y, (label, "text")]}
            case "named":
                return Pair(y, label)
            case _:
                return Output(y, label)


def autocast_precision(spec: PrecisionType, **options: Any) -> Precision:
    return build_precision(spec, CPU, autocast=AutocastKwargs(**options))


@pytest.mark.parametrize(("spec", "dtype"), HALF)
@pytest.mark.parametrize("shape", ["tensor", "dict", "named", "dataclass"])
def test_compute_is_half_and_outputs_are_float(
    spec: PrecisionType, dtype: torch.dtype, shape: str
) -> None:
    model, x = Model(shape), torch.randn(2, 4)
    precision = autocast_precision(spec)
    assert precision.convert(model) is model
    precision.convert(model)
    out = model(x)
    assert model.output_dtype == dtype
    assert model.layer.weight.dtype == torch.float32
    match shape:
        case "tensor":
            assert out.dtype == torch.float32
        case "dict":
            assert out["a"].dtype == out["b"][0].dtype == torch.float32
            assert out["b"][1][0].dtype == torch.long
            assert out["b"][1][1] == "text"
        case "named":
            assert type(out) is Pair
            assert out.logits.dtype == torch.float32
        case _:
            assert isinstance(out, Output)
            assert out.logits.dtype == torch.float32
            assert out.note == "kept"
    precision.restore(model)
    model(x)
    assert model.output_dtype == torch.float32
    assert "forward" not in model.__dict__


@pytest.mark.parametrize(("spec", "dtype"), HALF)
def test_it_computes_what_torch_computes(
    spec: PrecisionType, dtype: torch.dtype
) -> None:
    model, x = Model(), torch.randn(2, 4)
    with torch.autocast("cpu", dtype):
        expected = model(x).float()
    autocast_precision(spec).convert(model)
    assert torch.equal(model(x), expected)
    with torch.autocast("cpu", dtype):
        assert torch.equal(model(x), expected), "nests in another autocast"
    assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 3))
    assert not torch.is_autocast_enabled("cpu"), "an error leaves no autocast behind"


def test_outputs_can_be_kept_and_autocast_turned_off() -> None:
    model = Model()
    autocast_precision("bf16", output_dtype="keep").convert(model)
    assert model(torch.randn(2, 4)).dtype == torch.bfloat16
    plain = Model()
    autocast_precision("bf16", enabled=False).convert(plain)
    assert forwarding.find(plain, "autocast") is None
    precision = autocast_precision("bf16")
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with precision.forward_context():
        assert layer(x).dtype == torch.bfloat16
        with precision.forward_context(AutocastKwargs(enabled=False)):
            assert layer(x).dtype == torch.float32
    with build_precision("no", CPU).forward_context():
        assert layer(x).dtype == torch.float32


def logits(out: Any) -> Tensor:
    output_logits: Tensor = (
        out["a"] if isinstance(out, dict) else getattr(out, "logits", out)
    )
    return output_logits


@pytest.mark.parametrize("shape", ["tensor", "dict", "named"])
def test_the_replaced_forward_is_one_graph(shape: str) -> None:
    torch._dynamo.reset()
    model, x = Model(shape), torch.randn(2, 4)
    autocast_precision("bf16").convert(model)
    expected = model(x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    out = compiled(x)
    assert torch.equal(logits(out), logits(expected))
    assert logits(out).dtype == torch.float32


def test_a_copied_model_is_autocast_with_its_own_weights() -> None:
    model = Model()
    autocast_precision("bf16").convert(model)
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin.layer.weight)
    nn.init.zeros_(twin.layer.bias)
    assert twin(torch.randn(2, 4)).abs().max() == 0
    assert twin.output_dtype == torch.bfloat16


def test_fp16_refuses_weights_it_cannot_protect() -> None:
    with pytest.raises(
        PrecisionError, match=r"'layer.weight' and 1 more is float16.*model.float\(\)"
    ):
        autocast_precision("fp16").convert(Model().half())
    frozen = Model().half().requires_grad_(False)
    autocast_precision("fp16").convert(frozen)


def test_what_a_device_cannot_do_is_said() -> None:
    assert supported_half_precisions(CPU) == ["bf16", "fp16"]
    with pytest.raises(
        PrecisionError, match=r"mixed_precision='fp16' cannot run on hpu.*'no'"
    ):
        build_precision("fp16", torch.device("hpu"))
    with pytest.raises(PrecisionError, match="cannot run on a mps device"):
        build_precision("fp8", torch.device("mps"))


def step(
    precision: Precision,
    optimizer: torch.optim.Optimizer,
    weight: Tensor,
    gradient: float,
) -> bool:
    torch.autograd.backward(precision.scale((weight * gradient).sum()))
    result = precision.step(optimizer)
    optimizer.zero_grad()
    return result.applied


def test_the_scale_falls_grows_and_resumes() -> None:
    settings = GradScalerKwargs(
        init_scale=8.0, growth_interval=2, growth_factor=4.0, backoff_factor=0.25
    )
    precision = build_precision("fp16", CPU, scaler=settings)
    assert isinstance(precision, AutocastPrecision)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scales = []
    for gradient in (1.0, float("inf"), 1.0, 1.0, 1.0, float("nan"), 1.0):
        applied = step(precision, optimizer, weight, gradient)
        assert applied == (gradient == 1.0)
        scales.append(precision.state_dict()["scale"])
    assert scales == [8, 2, 2, 8, 8, 2, 2]
    resumed_precision = build_precision("fp16", CPU, scaler=settings)
    resumed_precision.load_state_dict(precision.state_dict())
    assert step(resumed_precision, optimizer, weight, 1.0)
    assert resumed_precision.state_dict() == {
        **precision.state_dict(),
        "scale": 8.0,
        "_growth_tracker": 0,
    }


def test_unscaling_twice_divides_once_and_absent_gradients_are_no_overflow() -> None:
    precision = build_precision("fp16", CPU)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    torch.autograd.backward(precision.scale(weight.sum() * 3))
    precision.unscale(optimizer)
    precision.unscale(optimizer)
    assert weight.grad is not None
    assert weight.grad.item() == 3
    assert precision.step(optimizer).applied
    assert weight.item() == -2
    optimizer.zero_grad()
    assert precision.step(optimizer).applied, "no gradient: nothing to overflow"


def test_a_disabled_scaler_steps_aside() -> None:
    precision = build_precision("fp16", CPU, scaler=GradScalerKwargs(enabled=False))
    weight = nn.Parameter(torch.ones(1))
    assert step(precision, torch.optim.SGD([weight], lr=1.0), weight, 2.0)
    assert weight.item() == -1


def test_the_scale_waits_for_gradients_in_flight() -> None:
    waiting = 2
    scaler = LossScaler(CPU, GradScalerKwargs(init_scale=8.0))
    precision = AutocastPrecision(
        "fp16", CPU, torch.float16, AutocastKwargs(), scaler, lambda: waiting
    )
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    step(precision, optimizer, weight, float("inf"))
    assert precision.scale(torch.tensor(1.0)).item() == 8
    assert scaler.get_scale() == scaler.state_dict()["scale"] == 8
    waiting = 1
    assert precision.scale(torch.tensor(1.0)).item() == 4


def test_a_scale_that_is_read_tells_what_the_latest_step_did() -> None:
    scaler = LossScaler(CPU, GradScalerKwargs(init_scale=8.0, growth_interval=2))
    precision = AutocastPrecision("fp16", CPU, torch.float16, AutocastKwargs(), scaler)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    step(precision, optimizer, weight, float("inf"))
    assert scaler.get_scale() == 4
    step(precision, optimizer, weight, 1.0)
    assert scaler.state_dict()["_growth_tracker"] == 1
    step(precision, optimizer, weight, 1.0)
    assert scaler.get_scale() == 8


def test_the_step_of_half_weights_is_an_error_where_they_were_taken() -> None:
    precision = build_precision("fp16", CPU)
    model = nn.Linear(2, 2).half()
    with pytest.raises(PrecisionError, match="is float16 and trainable"):
        precision.convert(model)
    precision.takes_half_weights = True
    optimizer = torch.optim.SGD(precision.convert(model).parameters(), lr=0.1)
    torch.autograd.backward(
        precision.scale(model(torch.ones(1, 2, dtype=torch.float16)).sum())
    )
    with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients\."):
        precision.step(optimizer)
