"""Weights in few bits: near the model's own outputs, small, and still small when they are streamed."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

from hasten import quantize_weights
from hasten.errors import ConfigError, MissingPackageError, PrepareError
from hasten.extensions.bigmodel import cpu_offload, remove_hook_from_submodules

pytestmark = pytest.mark.filterwarnings("ignore")


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return (
        nn.Sequential(
            *(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(3))
        )
        .to(torch.bfloat16)
        .eval()
    )


@pytest.mark.parametrize(("kind", "tolerance"), [("int8", 0.02), ("int4", 0.15)])
def test_quantized_outputs_are_near_and_equal_when_streamed(
    kind: str, tolerance: float
) -> None:
    model, x = build(), torch.randn(4, 128, dtype=torch.bfloat16)
    with torch.no_grad():
        expected_output = model(x)
        quantize_weights(model, kind)  # type: ignore[arg-type]
        quantized_output = model(x)
        assert type(model[0][0].weight.data) is not torch.Tensor  # type: ignore[index]
        assert (quantized_output - expected_output).abs().mean() < tolerance
        cpu_offload(model, "cpu")
        for _ in range(2):
            assert torch.equal(model(x), quantized_output)
    remove_hook_from_submodules(model)


def test_widths_that_groups_do_not_divide_are_named() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 96)).to(torch.bfloat16)
    with pytest.raises(
        ConfigError, match=r"0 has 64 inputs.*groups of 128.*group_size=64"
    ):
        quantize_weights(model, "int4")
    quantize_weights(model, "int4", group_size=64)


def test_what_cannot_be_quantized_is_said() -> None:
    with pytest.raises(ConfigError, match="'int8' or 'int4'"):
        quantize_weights(build(), "int3")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="group_size=32 is only supported for"):
        quantize_weights(build(), "nf4", group_size=32)
    with torch.device("meta"):
        empty = nn.Linear(4, 4)
    with pytest.raises(PrepareError, match="Load them first"):
        quantize_weights(nn.Sequential(empty), "int8")


@pytest.mark.parametrize(
    ("kind", "tolerance"), [("nf4", 0.15), ("fp4", 0.2), ("llm_int8", 0.03)]
)
def test_weights_of_bitsandbytes_are_small_and_near(
    kind: str, tolerance: float
) -> None:
    pytest.importorskip("bitsandbytes")
    model, x = build(), torch.randn(4, 128, dtype=torch.bfloat16)
    with torch.no_grad():
        expected_output = model(x)
        quantize_weights(model, kind, skip_modules=("2.0",))  # type: ignore[arg-type]
        assert (model(x) - expected_output).abs().mean() < tolerance
    sizes = [p.numel() * p.element_size() for p in model.parameters() if p.ndim == 2]
    assert sizes == [128 * 64 if kind != "llm_int8" else 128 * 128] * 2 + [
        128 * 128 * 2
    ]
    with pytest.raises(PrepareError, match="quantized by bitsandbytes"):
        cpu_offload(model, "cpu")


def test_without_bitsandbytes_its_kinds_say_what_to_install() -> None:
    if importlib.util.find_spec("bitsandbytes"):
        pytest.skip("bitsandbytes is installed")
    with pytest.raises(MissingPackageError, match="pip install 'bitsandbytes"):
        quantize_weights(build(), "nf4")
