"""Hooks around a module's forward, for libraries that attach their own; offloading ones follow with big models."""

from __future__ import annotations

from typing import Any

from torch import nn

from accelerate import notyet
from hasten.modules import forwarding

# Any in this file: a module's arguments and outputs.


class ModelHook:
    """What runs before and after a module's forward; override what is needed."""

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """When the hook is attached."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before forward: the arguments it gets."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """After forward: the output the caller gets."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """When the hook is taken off."""
        return module


class SequentialHook(ModelHook):
    """Several hooks, one after the other."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


class _Hooked(forwarding.Forward):
    """A forward between a hook's two halves."""

    tag = "model hook"

    def __init__(self, hook: ModelHook) -> None:
        self.hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.hook.pre_forward(self.module, *args, **kwargs)
        return self.hook.post_forward(self.module, self.inner(*args, **kwargs))


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """The module with a hook around its forward, instead of or after the one it has."""
    before = getattr(module, "_hf_hook", None)
    if append and before is not None:
        remove_hook_from_module(module)
        hook = SequentialHook(before, hook)
    elif before is not None:
        remove_hook_from_module(module)
    module = hook.init_hook(module)
    module.__dict__["_hf_hook"] = hook
    forwarding.replace(module, _Hooked(hook))
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """The module without its hook."""
    if "_hf_hook" in module.__dict__:
        hook: ModelHook = module.__dict__.pop("_hf_hook")
        hook.detach_hook(module)
        forwarding.restore(module, _Hooked.tag)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Take the hooks of a module and all below it off."""
    remove_hook_from_module(module, recurse=True)


AlignDevicesHook = notyet.klass("hooks.AlignDevicesHook", notyet.BIG_MODELS, ModelHook)
CpuOffload = notyet.klass("hooks.CpuOffload", notyet.BIG_MODELS, ModelHook)
LayerwiseCastingHook = notyet.klass("hooks.LayerwiseCastingHook", notyet.BIG_MODELS, ModelHook)
UserCpuOffloadHook = notyet.klass("hooks.UserCpuOffloadHook", notyet.BIG_MODELS)
attach_align_device_hook = notyet.function("hooks.attach_align_device_hook", notyet.BIG_MODELS)
attach_align_device_hook_on_blocks = notyet.function("hooks.attach_align_device_hook_on_blocks", notyet.BIG_MODELS)
attach_execution_device_hook = notyet.function("hooks.attach_execution_device_hook", notyet.BIG_MODELS)
