"""Quantized weights as bytes: any layout of inner tensors, parameters of integers, and shapes for plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten.errors import StepError
from hasten.modules.quantized import UnpackedInForward, frozen_integers, to_bytes


class InnerTensors:
    """What torchao's tensors have: named inner tensors."""

    def __init__(self, **tensors: Tensor) -> None:
        self.__dict__.update(tensors)
        self.names = list(tensors)
        self.shape = torch.Size([4])

    def detach(self) -> InnerTensors:
        return self

    def stride(self) -> tuple[int, ...]:
        return (1,)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return self.names, None


def test_single_scales_of_any_stride_become_bytes() -> None:
    scale = torch.arange(64.0).as_strided((1,), (64,))
    codes = torch.arange(6, dtype=torch.uint8).view(2, 3).t()
    quantized: Any = InnerTensors(codes=codes, scale=scale)
    data, layout = to_bytes(quantized)
    assert data.shape == (32, 1)
    assert [(name, start) for name, _, _, start in layout.inner] == [
        ("codes", 0),
        ("scale", 16),
    ]
    assert data[:6, 0].tolist() == codes.flatten().tolist()


def test_parameters_of_integers_are_frozen_inside_the_block_only() -> None:
    integers, floats = torch.ones(2, dtype=torch.uint8), torch.ones(2)
    original_new = vars(nn.Parameter)["__new__"]
    with frozen_integers():
        assert not nn.Parameter(integers).requires_grad
        assert nn.Parameter(floats).requires_grad
        assert not nn.Parameter(floats, requires_grad=False).requires_grad
        assert isinstance(nn.Linear(2, 2).weight, nn.Parameter)
    assert vars(nn.Parameter)["__new__"] is original_new
    with pytest.raises(RuntimeError, match="floating point"):
        nn.Parameter(integers)


def test_converted_bytes_are_refused() -> None:
    layer = nn.Linear(2, 2)
    quantized: Any = InnerTensors(codes=torch.ones(4, dtype=torch.uint8))
    UnpackedInForward(layer, "weight", to_bytes(quantized)[1])
    with pytest.raises(
        StepError,
        match=r"quantized weight of Linear were converted to torch.float32.*mixed_precision='no'",
    ):
        layer(torch.ones(1, 2))
