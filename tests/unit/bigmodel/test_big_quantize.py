"""Weights in few bits: near the model's own outputs, small, and still small when they are streamed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hasten import cpu_offload, quantize_weights, remove_hook_from_submodules
from hasten.errors import ConfigError, PrepareError

pytestmark = pytest.mark.filterwarnings("ignore")


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(3))).to(torch.bfloat16).eval()


@pytest.mark.parametrize(("kind", "tolerance"), [("int8", 0.02), ("int4", 0.15)])
def test_quantized_outputs_are_near_and_equal_when_streamed(kind: str, tolerance: float) -> None:
    model, x = build(), torch.randn(4, 128, dtype=torch.bfloat16)
    with torch.no_grad():
        wanted = model(x)
        quantize_weights(model, kind)  # type: ignore[arg-type]
        found = model(x)
        assert type(model[0][0].weight.data) is not torch.Tensor  # type: ignore[index]
        assert (found - wanted).abs().mean() < tolerance
        cpu_offload(model, "cpu")
        for _ in range(2):
            assert torch.equal(model(x), found)
    remove_hook_from_submodules(model)


def test_what_cannot_be_quantized_is_said() -> None:
    with pytest.raises(ConfigError, match="'int8' or 'int4'"):
        quantize_weights(build(), "int3")  # type: ignore[arg-type]
    with torch.device("meta"):
        empty = nn.Linear(4, 4)
    with pytest.raises(PrepareError, match="Load them first"):
        quantize_weights(nn.Sequential(empty), "int8")
