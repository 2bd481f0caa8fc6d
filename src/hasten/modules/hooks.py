"""Hooks around a module's forward, one per module, with the functions that attach and remove them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hasten.modules import forwarding
from hasten.trees import map_tensors

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class ModelHook:
    """Base class of hooks around a module's forward. Override the methods you need."""

    no_grad = False
    """Run the forward without gradients."""

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Initialise the module when the hook is attached; returns the module."""
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[Args, Kwargs]:
        """Return the arguments of the forward; called before it."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return the output for the caller; called after the forward."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Restore the module when the hook is removed; returns the module."""
        return module


class SequentialHook(ModelHook):
    """Sequence of hooks, called in order at every point."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[Args, Kwargs]:
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


class HookForward(forwarding.Forward):
    """Forward with a hook around it."""

    tag = "hook"

    def __init__(self, hook: ModelHook) -> None:
        self.hook = hook

    # Any: the user's arguments and outputs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.hook.pre_forward(self.module, *args, **kwargs)
        if self.hook.no_grad:
            with torch.no_grad():
                output = self.inner(*args, **kwargs)
        else:
            output = self.inner(*args, **kwargs)
        return self.hook.post_forward(self.module, output)


def hook_of(module: nn.Module) -> ModelHook | None:
    """Return the hook attached to this module, or None."""
    forward = forwarding.find(module, HookForward.tag)
    if isinstance(forward, HookForward):
        return forward.hook
    return None


def add_hook_to_module(
    module: nn.Module, hook: ModelHook, append: bool = False
) -> nn.Module:
    """Attach `hook` to a module's forward; it replaces an earlier hook unless `append` is set."""
    earlier_hook = hook_of(module)
    if earlier_hook is not None and append:
        chained_hooks = [
            *(
                earlier_hook.hooks
                if isinstance(earlier_hook, SequentialHook)
                else [earlier_hook]
            ),
            hook,
        ]
        forwarding.restore(module, HookForward.tag)
        module = hook.init_hook(module)
        forwarding.replace(module, HookForward(SequentialHook(*chained_hooks)))
        return module
    if earlier_hook is not None:
        module = remove_hook_from_module(module)
    module = hook.init_hook(module)
    forwarding.replace(module, HookForward(hook))
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove a module's hook, and with `recurse` those of its submodules."""
    hook = hook_of(module)
    if hook is not None:
        module = hook.detach_hook(module)
        forwarding.restore(module, HookForward.tag)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse=True)
    return module


class LayerwiseCastingHook(ModelHook):
    """Hook that stores a layer's weights in a small dtype and computes in a larger one."""

    def __init__(
        self,
        storage_dtype: torch.dtype,
        compute_dtype: torch.dtype,
        non_blocking: bool = False,
    ) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[Args, Kwargs]:
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        cast = (self._cast(args), self._cast(kwargs))
        return cast[0], cast[1]

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        return module.to(dtype=self.compute_dtype)

    def _cast(self, tree: Any) -> Any:
        return map_tensors(
            lambda x: x.to(self.compute_dtype) if x.is_floating_point() else x, tree
        )
