"""Offloading by hooks: weights come for a forward and leave; the plan that libraries see is what is attached."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelerate._impl.models import hooked
from accelerate._impl.models.hooked import hooks_of_map, hooks_of_offloading
from accelerate.hooks import (
    AlignDevicesHook,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    remove_hook_from_submodules,
)
from accelerate.utils import align_module_device, has_offloaded_params
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


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("preload", [None, ["Net"]])
def test_hooks_bring_weights_and_take_them_away(
    buffers: bool, preload: list[str] | None
) -> None:
    model, reference = build(), build()
    weights = (
        {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if preload is None
        else None
    )
    attach_align_device_hook(
        model,
        "cpu",
        offload=True,
        weights_map=weights,
        offload_buffers=buffers,
        preload_module_classes=preload,
    )
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.norm.running_mean is not None
    assert model.norm.running_mean.is_meta == buffers
    assert has_offloaded_params(model if preload else model.first)
    for _ in range(2):
        assert torch.equal(model(X)["y"], reference(X)["y"])
    assert all(parameter.is_meta for parameter in model.parameters())
    remove_hook_from_submodules(model)
    assert torch.equal(model(X)["y"], reference(X)["y"])
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.parameters(), reference.parameters(), strict=True)
    )


def test_blocks_get_their_own_devices() -> None:
    model, reference = build(), build()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    device_map = {"first": "cpu", "norm": "cpu", "last": "cpu"}
    attach_align_device_hook_on_blocks(
        model, device_map, {"last": True}, weights_map=weights
    )
    assert model.last.weight.is_meta
    assert not model.first.weight.is_meta
    assert torch.equal(model(X)["y"], reference(X)["y"])
    hook = hook_of(model)
    assert isinstance(hook, AlignDevicesHook)
    assert hook.io_same_device
    remove_hook_from_submodules(model)
    assert hook_of(model) is None


def test_offloaded_weights_change_inside_the_block_that_aligns_them() -> None:
    model, reference = build(), build()
    model(X)
    attach_align_device_hook(model, "cpu", offload=True)
    model(X)
    with torch.no_grad(), align_module_device(model.last, "cpu"):
        model.last.weight.data += 1
        reference.last.weight.data += 1
    assert torch.equal(model(X)["y"], reference(X)["y"])
    remove_hook_from_submodules(model)


@pytest.mark.parametrize("preloaded_classes", [[], ["Sequential"]])
@pytest.mark.parametrize("buffers", [False, True])
def test_the_plan_of_hooks_is_what_offloading_by_hooks_attaches(
    preloaded_classes: list[str], buffers: bool
) -> None:
    def model() -> nn.Module:
        inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU())
        return nn.ModuleDict(
            {
                "first": nn.Linear(2, 2),
                "inner": inner,
                "empty": nn.ReLU(),
                "last": nn.Linear(2, 2),
            }
        )

    device_map: dict[str, int | str | torch.device] = {
        "first": "meta",
        "inner": "cpu",
        "empty": "cpu",
        "last": "cpu",
    }
    options = {
        "offload_buffers": buffers,
        "preload_module_classes": preloaded_classes,
        "skip_keys": ["kept"],
    }
    offloaded = model()
    hooked.dispatch_model(offloaded, device_map, "meta", **options)  # type: ignore[arg-type]
    flags = (
        "execution_device",
        "offload",
        "io_same_device",
        "offload_buffers",
        "place_submodules",
        "skip_keys",
    )
    attached = {}
    for name, module in offloaded.named_modules():
        if (hook := hook_of(module)) is not None:
            attached[name] = {flag: getattr(hook, flag) for flag in flags}
    plain = model()
    names = {module: name for name, module in plain.named_modules()}
    planned: dict[str, Any] = {}
    for module, arguments in hooks_of_map(plain, device_map, "meta", options):
        planned.setdefault(names[module], dict.fromkeys(flags, False) | arguments)
    assert planned == attached
    planned = {
        names[module]: arguments
        for module, arguments in hooks_of_offloading(plain, "meta", options)
    }
    assert set(planned) == {
        "first",
        "last",
        *(["inner"] if preloaded_classes else ["inner.0", "inner.1"]),
    }
