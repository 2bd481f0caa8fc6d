"""Hooks around a module's forward: hasten's, under the names and with the attributes that other libraries look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from accelerate._impl.models import align
from accelerate._impl.models.align import AlignDevicesHook
from accelerate._impl.models.hooked import Planned
from accelerate._impl.surface.shown import like
from hasten.extensions.bigmodel import dispatch
from hasten.extensions.bigmodel.placed import StreamedForward, end_dispatch
from hasten.modules import forwarding, hooks
from hasten.modules.hooks import ModelHook, SequentialHook, hook_of

# Any in this file: a module's arguments and outputs.
# that dispatch_model puts on models
_accelerate_added_attributes = ["to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa"]


class StreamedHook(AlignDevicesHook):
    """A stand-in that libraries find on a module whose weights hasten streams: at rest they are in place, on the host."""

    init_hook = ModelHook.init_hook
    pre_forward = ModelHook.pre_forward
    detach_hook = ModelHook.detach_hook

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Let copies on the device be made anew: the weights may have been changed."""
        increment_version(list(module.parameters(recurse=self.place_submodules)))
        return output


def mirror_hooks(model: nn.Module) -> None:
    for module in model.modules():
        if (module_hook := hook_of(module)) is not None:
            show_hook(module, module_hook)


def show_plan(planned: Iterable[Planned]) -> None:
    """Show hooks on modules whose weights hasten streams, or computes with on several devices."""
    for module, options in planned:
        if options.get("offload") and "_hf_hook" not in module.__dict__:
            streamed_weights = dict(
                module.named_parameters(recurse=options["place_submodules"])
            )
            streamed_hook = StreamedHook(**options, weights_map=streamed_weights)
            streamed_hook.original_devices = {
                weight_name: torch.device("cpu") for weight_name in streamed_weights
            }
            show_hook(module, streamed_hook)
        elif "_hf_hook" not in module.__dict__:
            show_hook(module, AlignDevicesHook(**options))


def show_hook(module: nn.Module, hook: ModelHook) -> nn.Module:
    """Set the attributes under which libraries find a module's hook and the forward it had before."""
    forward: Any = module.forward
    while isinstance(forward, forwarding.Forward):
        forward = forward.inner
    module.__dict__.update(_hf_hook=hook, _old_forward=forward)
    return module


def add_hook_to_module(
    module: nn.Module, hook: ModelHook, append: bool = False
) -> nn.Module:
    if append and (earlier := hook_of(module)) is not None:
        module = hooks.remove_hook_from_module(module)
        hook = SequentialHook(earlier, hook)
    return show_hook(hooks.add_hook_to_module(module, hook), hook)


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    if recurse or forwarding.find(module, StreamedForward.tag) is not None:
        end_dispatch(module)
    module = hooks.remove_hook_from_module(module, recurse)
    for submodule in module.modules() if recurse else [module]:
        for attribute_name in ("_hf_hook", "_old_forward"):
            submodule.__dict__.pop(attribute_name, None)
    return module


class UserCpuOffloadHook(dispatch.UserCpuOffloadHook):
    """Handle of a model that comes to its device when it is called."""

    def remove(self) -> None:
        remove_hook_from_module(self.model)


def remove_hook_from_submodules(module: nn.Module) -> None:
    remove_hook_from_module(module, recurse=True)


def mirrored_hook(attach: Callable[..., None]) -> Callable[..., None]:
    """Return the function of hasten's, after which every hook is found where libraries look for it."""

    @like(attach)
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        attach(module, *args, **kwargs)
        mirror_hooks(module)

    return run


attach_align_device_hook = mirrored_hook(align.attach_align_device_hook)
attach_align_device_hook_on_blocks = mirrored_hook(
    align.attach_align_device_hook_on_blocks
)
attach_execution_device_hook = mirrored_hook(align.attach_execution_device_hook)
