"""fp8 through torchao, emulated on the CPU."""

from __future__ import annotations

import copy
import logging
import warnings
from importlib import import_module

import pytest
import torch
from torch import nn

from hasten.config.sections.loop import AORecipeKwargs, FP8Config
from hasten.errors import MissingPackageError, PrecisionError
from hasten.modules.quantized import PackedLayers, is_torchao
from hasten.optional import available, need
from hasten.precision.build import build_precision
from hasten.precision.fp8 import choose_backend, convert_ao

CPU = torch.device("cpu")
needs_ao = pytest.mark.skipif(
    not available("torchao"), reason="torchao is not installed"
)
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16)
    )


def layer_kinds(net: nn.Sequential) -> list[str]:
    return [type(net[i]).__name__ for i in (0, 2, 4)]


@needs_ao
def test_all_but_the_first_and_last_layers_are_converted_and_train() -> None:
    net = model()
    plain = copy.deepcopy(net)
    parameters = list(net.parameters())
    precision = build_precision("fp8", CPU)
    precision.convert(net)
    precision.convert(net)
    assert layer_kinds(net) == ["Linear", "Float8Linear", "Linear"]
    assert all(a is b for a, b in zip(parameters, net.parameters(), strict=True)), (
        "optimizers stay valid"
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(16, 16)
    losses = []
    for _ in range(20):
        out = net(x)
        assert out.dtype == torch.float32
        loss = (out - x).pow(2).mean()
        loss.backward()
        assert precision.step(optimizer).applied
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    torch.testing.assert_close(
        torch.tensor(losses[0]),
        (plain(x) - x).pow(2).mean().detach(),
        rtol=0.05,
        atol=0,
    )


@needs_ao
def test_filters_and_recipes() -> None:
    net = model()
    build_precision(
        "fp8", CPU, fp8=FP8Config(ao=AORecipeKwargs(skip_first_and_last=False))
    ).convert(net)
    assert layer_kinds(net) == ["Float8Linear"] * 3
    net = model()
    last_layer_only = AORecipeKwargs(
        module_filter_func=lambda module, name: name == "4", recipe_name="rowwise"
    )
    build_precision("fp8", CPU, fp8=FP8Config(ao=last_layer_only)).convert(net)
    assert layer_kinds(net) == ["Linear", "Linear", "Float8Linear"]
    ao_config = import_module("torchao.float8").Float8LinearConfig(
        enable_fsdp_float8_all_gather=True
    )
    for sharded in (False, True):
        net = model()
        build_precision(
            "fp8",
            CPU,
            fp8=FP8Config(ao=AORecipeKwargs(config=ao_config)),
            sharded=sharded,
        ).convert(net)
        assert vars(net[2])["config"].enable_fsdp_float8_all_gather is sharded, (
            "gathered in fp8 only where there are shards"
        )
    no_layer = AORecipeKwargs(module_filter_func=lambda module, name: False)
    with pytest.raises(PrecisionError, match="found no linear layer to convert"):
        build_precision("fp8", CPU, fp8=FP8Config(ao=no_layer)).convert(model())


def test_backends_are_chosen_and_missing_ones_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert choose_backend("te") == "te"
    assert choose_backend("ao") == "ao"
    with pytest.raises(
        PrecisionError, match=r"\(te\) cannot run on a cpu device.*fp8 backend 'ao'"
    ):
        build_precision("fp8", CPU, fp8=FP8Config(backend="te"))
    with caplog.at_level(logging.WARNING, "hasten"), warnings.catch_warnings():
        precision = build_precision("fp8", CPU, fp8=FP8Config(backend="ao"))
    assert "emulated" in caplog.text
    if not available("torchao"):
        with pytest.raises(MissingPackageError, match="torchao"):
            precision.convert(model())


@needs_ao
def test_weights_that_are_cast_while_they_train_are_not_quantized() -> None:
    """FSDP2 gathers them in fp8, and shards them as any others."""
    ao_config = need("torchao.float8").Float8LinearConfig(
        enable_fsdp_float8_all_gather=True, emulate=True
    )
    net = model()
    convert_ao(net, AORecipeKwargs(config=ao_config), emulate=True, sharded=True)
    weight = net.get_parameter("2.weight")
    assert type(weight.data).__name__ == "WeightWithDynamicFloat8CastTensor"
    assert not is_torchao(weight)
    assert PackedLayers(net, CPU).num_bytes == 0
