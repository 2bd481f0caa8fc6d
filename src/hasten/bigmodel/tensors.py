"""Functions for single tensors of a module: move them, align them with a device, check for offloading, cast layerwise."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from hasten.bigmodel.align import AlignDevicesHook, set_tensor
from hasten.bigmodel.device_map import DType, as_dtype
from hasten.bigmodel.dispatch import Place, device_of
from hasten.bigmodel.placed import StreamedForward, streamers_of
from hasten.modules import forwarding
from hasten.modules.hooks import LayerwiseCastingHook, SequentialHook, add_hook_to_module, hook_of


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Place,
    value: Tensor | None = None,
    dtype: DType = None,
    tied_params_map: MutableMapping[int, dict[torch.device, Tensor]] | None = None,
    non_blocking: bool = False,
) -> None:
    """Move the parameter or buffer `tensor_name` of a module to a device, with another value or dtype if given."""
    set_tensor(module, tensor_name, device_of(device), value, as_dtype(dtype), non_blocking, tied_params_map)


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether the module's direct weights are on the device only during its forward."""
    return _offloading(module) is not None or forwarding.find(module, StreamedForward.tag) is not None


def _offloading(module: nn.Module) -> AlignDevicesHook | None:
    """Return the hook that brings the module's weights to the device for its forward, or None."""
    hook = hook_of(module)
    hooks = hook.hooks if isinstance(hook, SequentialHook) else [hook]
    return next((one for one in hooks if isinstance(one, AlignDevicesHook) and one.offload), None)


@contextmanager
def align_module_device(module: nn.Module, execution_device: Place | None = None) -> Iterator[None]:
    """Context manager in which the module's direct parameters are on `execution_device`; changes to them are stored.

    Without a device, offloaded parameters move to their compute device, and others stay.
    """
    hook = _offloading(module)
    if hook is not None:
        with hook.brought(module, None if execution_device is None else device_of(execution_device)):
            yield
        return
    streamers = streamers_of(module)
    target = device_of(execution_device) if execution_device is not None else None
    if target is None and streamers:
        target = streamers[0].device
    if target is None:
        yield
        return
    before = {name: param for name, param in module._parameters.items() if param is not None}
    try:
        for name, param in before.items():
            if param.device != target:
                set_tensor(module, name, target)
        yield
    finally:
        with torch.no_grad():
            for name, param in before.items():
                now = module._parameters.get(name)
                if now is not None and now is not param:
                    if not now.is_meta:
                        param.copy_(now)
                    module._parameters[name] = param
        increment_version(list(before.values()))  # changes through .data do not count otherwise


CASTABLE: Final = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    nn.Linear,
)
"""Layers that mainly multiply with their weights; norms need their precision."""


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Collection[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the weights of linear and convolution layers in `storage_dtype`, and compute in `compute_dtype`.

    Modules whose name matches a pattern, or that are of one of the classes, keep their dtype, including their submodules.
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else list(skip_modules_pattern or ())

    def visit(part: nn.Module, name: str) -> None:
        skipped = isinstance(part, skip_modules_classes or ()) or any(re.search(one, name) for one in patterns)
        if skipped:
            return
        if isinstance(part, CASTABLE):
            add_hook_to_module(part, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)
            return
        for child_name, child in part.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name)

    visit(module, "")
