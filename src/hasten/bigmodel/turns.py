"""Several models taking turns on one device: each comes when it is called, and sends the one before it back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hasten.bigmodel.dispatch import Place, device_of
from hasten.bigmodel.placed import moved
from hasten.modules.hooks import Args, Kwargs, ModelHook, add_hook_to_module, remove_hook_from_module
from hasten.runtime.devices import choose_device, empty_cache

# Any in this file: a module's arguments.


class CpuOffload(ModelHook):
    """Moves a whole model to a device when it is called, after the model before it has gone back to the host."""

    def __init__(
        self, execution_device: Place | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.execution_device = choose_device(0) if execution_device is None else device_of(execution_device)
        self.prev_module_hook = prev_module_hook

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Args, Kwargs]:
        there = next((parameter.device for parameter in module.parameters()), self.execution_device)
        if there != self.execution_device:
            if self.prev_module_hook is not None:
                self.prev_module_hook.offload()
            module.to(self.execution_device)
        return moved(args, self.execution_device), moved(kwargs, self.execution_device)


class UserCpuOffloadHook:
    """The handle of a model that takes turns: send it back to the host, or take the hook off."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model back to the host."""
        device = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        self.hook.init_hook(self.model)
        empty_cache(device)

    def remove(self) -> None:
        """Leave the model where it is, without the hook."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: nn.Module, execution_device: Place | None = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """The model, on the host until it is called and on the device from then on, and the handle that sends it back.

    Chain the models of a pipeline by giving each the handle of the one before.
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
