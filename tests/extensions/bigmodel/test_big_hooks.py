"""Models taking turns, layerwise casting, single tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten.errors import PrepareError
from hasten.extensions import bigmodel
from hasten.extensions.bigmodel.dispatch import CpuOffload
from hasten.modules.hooks import hook_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(4, 6),
            nn.BatchNorm1d(6),
            nn.Linear(6, 2),
        )

    def forward(self, x: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        return {"y": self.last(self.norm(torch.relu(self.first(x))))}


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    """Let torch's kernels open what they keep open for the life of the process."""
    with torch.no_grad():
        nn.Linear(16, 48)(torch.zeros(3, 4, 16))


def build() -> Net:
    torch.manual_seed(0)
    return Net().eval()


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def test_offloaded_weights_change_inside_the_block_that_aligns_them() -> None:
    for attach in (
        lambda m: bigmodel.cpu_offload(m, "cpu"),
        lambda m: m,
    ):
        model, reference = build(), build()
        model(X)
        attach(model)
        model(X)
        with torch.no_grad(), bigmodel.align_module_device(model.last, "cpu"):
            model.last.weight.data += 1
            reference.last.weight.data += 1
        assert torch.equal(model(X)["y"], reference(X)["y"])
        bigmodel.remove_hook_from_submodules(model)


def test_models_take_turns() -> None:
    first, second = build(), build()
    first, handle = bigmodel.cpu_offload_with_hook(first, "cpu")  # type: ignore[assignment]
    second, last = bigmodel.cpu_offload_with_hook(  # type: ignore[assignment]
        second, "cpu", prev_module_hook=handle
    )
    reference = build()
    assert torch.equal(
        second(first(X)["y"].new_tensor(X.tolist()))["y"], reference(X)["y"]
    )
    hook = last.hook
    assert isinstance(hook, CpuOffload)
    assert hook.prev_module_hook is handle
    handle.offload()
    handle.remove()
    last.remove()
    assert hook_of(first) is None


def test_the_model_before_is_sent_back_when_the_next_one_is_called() -> None:
    sent: list[str] = []

    class Handle:
        model = build()

        def offload(self) -> None:
            sent.append("back")

    hook = CpuOffload("meta", Handle())  # type: ignore[arg-type]  # another device than the one the model is on
    model = build()
    hook.pre_forward(model)
    assert sent == [], "the model before is on the host"
    assert next(model.parameters()).is_meta
    Handle.model.to("meta")
    hook.pre_forward(model)
    assert sent == ["back"]


def test_layers_are_kept_small_and_computed_large() -> None:
    model, reference = build(), build()
    bigmodel.attach_layerwise_casting_hooks(
        model, torch.float8_e4m3fn, torch.float32, skip_modules_pattern="last"
    )
    assert model.first.weight.dtype is torch.float8_e4m3fn
    assert model.last.weight.dtype is model.norm.weight.dtype is torch.float32
    small = reference.first.weight.detach().to(torch.float8_e4m3fn).float()
    reference.first.weight.data = small
    assert reference.first.bias is not None
    reference.first.bias.data = reference.first.bias.data.to(
        torch.float8_e4m3fn
    ).float()
    assert torch.equal(model(X)["y"], reference(X)["y"])
    assert model.first.weight.dtype is torch.float8_e4m3fn


def test_single_tensors_are_set() -> None:
    model = build()
    bigmodel.set_module_tensor_to_device(model, "first.weight", "meta")
    assert model.first.weight.is_meta
    with pytest.raises(PrepareError, match="pass `value`"):
        bigmodel.set_module_tensor_to_device(model, "first.weight", "cpu")
    with pytest.raises(PrepareError, match="has shape"):
        bigmodel.set_module_tensor_to_device(
            model, "first.weight", "cpu", torch.zeros(2, 2)
        )
    with pytest.raises(PrepareError, match="no parameter or buffer"):
        bigmodel.set_module_tensor_to_device(model, "first.wight", "cpu")
    bigmodel.set_module_tensor_to_device(
        model, "first.weight", "cpu", torch.ones(6, 4), dtype="float16"
    )
    assert model.first.weight.dtype is torch.float16
    assert isinstance(model.first.weight, nn.Parameter)
    bigmodel.set_module_tensor_to_device(
        model, "norm.running_mean", "cpu", torch.ones(6)
    )
    assert "running_mean" in model.norm._buffers
