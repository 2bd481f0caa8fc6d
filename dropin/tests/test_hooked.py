"""Offloading by hooks: the plan that libraries see is what is attached."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate._impl.models import hooked
from accelerate._impl.models.hooked import hooks_of_map, hooks_of_offloading
from hasten.modules.hooks import hook_of


@pytest.mark.parametrize("whole", [[], ["Sequential"]])
@pytest.mark.parametrize("buffers", [False, True])
def test_the_plan_of_hooks_is_what_offloading_by_hooks_attaches(whole: list[str], buffers: bool) -> None:
    def model() -> nn.Module:
        inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU())
        return nn.ModuleDict({"first": nn.Linear(2, 2), "inner": inner, "empty": nn.ReLU(), "last": nn.Linear(2, 2)})

    places: dict[str, int | str | torch.device] = {"first": "meta", "inner": "cpu", "empty": "cpu", "last": "cpu"}
    options = {"offload_buffers": buffers, "preload_module_classes": whole, "skip_keys": ["kept"]}
    offloaded = model()
    hooked.dispatch_model(offloaded, places, "meta", **options)  # type: ignore[arg-type]
    flags = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys")
    attached = {}
    for name, part in offloaded.named_modules():
        if (hook := hook_of(part)) is not None:
            attached[name] = {flag: getattr(hook, flag) for flag in flags}
    plain = model()
    names = {part: name for name, part in plain.named_modules()}
    planned: dict[str, Any] = {}
    for part, arguments in hooks_of_map(plain, places, "meta", options):
        planned.setdefault(names[part], dict.fromkeys(flags, False) | arguments)
    assert planned == attached
    planned = {names[part]: arguments for part, arguments in hooks_of_offloading(plain, "meta", options)}
    assert set(planned) == {"first", "last", *(["inner"] if whole else ["inner.0", "inner.1"])}
