"""Functions for single tensors of a module: move them, check for offloading, cast layerwise; and the end of all hooks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, MutableMapping
from contextlib import contextmanager
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from hasten.errors import PrepareError
from hasten.extensions.bigmodel.device_map import DType, as_dtype
from hasten.extensions.bigmodel.dispatch import Place, device_of
from hasten.extensions.bigmodel.placed import StreamedForward, detach, streamers_of
from hasten.modules import forwarding
from hasten.modules.hooks import (
    LayerwiseCastingHook,
    add_hook_to_module,
    remove_hook_from_module,
)
from hasten.modules.surgery import parent_of

TiedMap = MutableMapping[int, dict[torch.device, Tensor]]
"""Copies of shared weights on each device, by the address of the weight."""


def set_tensor(
    module: nn.Module,
    name: str,
    device: torch.device,
    value: Tensor | None = None,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
    tied: TiedMap | None = None,
) -> None:
    """Replace one tensor of a module; a parameter keeps its class.

    Raises: PrepareError for an unknown name, a value of another shape, or a meta tensor without a value.
    """
    owner, last = parent_of(module, name)
    is_buffer = last in owner._buffers
    now = owner._buffers[last] if is_buffer else owner._parameters.get(last)
    if now is None:
        raise PrepareError(
            f"{type(owner).__name__} has no parameter or buffer {last!r} to put on {device}."
        )
    if now.is_meta and device.type != "meta" and value is None:
        raise PrepareError(
            f"{name} is on the meta device and has no values; pass `value` to put it on {device}."
        )
    if value is not None and value.shape != now.shape and not (now.numel() == 0):
        raise PrepareError(
            f"{name} has shape {tuple(now.shape)}, but the given value has shape {tuple(value.shape)}; pass a "
            "value of the same shape."
        )
    source = now if value is None else value
    memory = 0 if source.is_meta else source.data_ptr()
    shared = tied.get(memory, {}).get(device) if tied is not None and memory else None
    with torch.no_grad():
        fresh: Any = (
            source.to(device, dtype, non_blocking=non_blocking)
            if shared is None
            else shared
        )
    if is_buffer:
        owner._buffers[last] = fresh
        return
    grads = now.requires_grad and fresh.is_floating_point()
    if fresh is not now and (
        shared is None
        or not isinstance(fresh, nn.Parameter)
        or fresh.requires_grad != grads
    ):
        kind: Any = type(now)  # Any: a subclass with another constructor
        options = {} if kind is nn.Parameter else _options(now)
        fresh = kind(fresh, requires_grad=grads, **options)
    if tied is not None and memory in tied:
        tied[memory][device] = fresh
    owner._parameters[last] = fresh


def _options(parameter: Tensor) -> dict[str, Any]:
    """Return the attributes of a parameter that its class takes as arguments."""
    known = signature(type(parameter)).parameters
    return {name: one for name, one in parameter.__dict__.items() if name in known}


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Place,
    value: Tensor | None = None,
    dtype: DType = None,
    tied_params_map: TiedMap | None = None,
    non_blocking: bool = False,
) -> None:
    """Move the parameter or buffer `tensor_name` of a module to a device, with another value or dtype if given."""
    set_tensor(
        module,
        tensor_name,
        device_of(device),
        value,
        as_dtype(dtype),
        non_blocking,
        tied_params_map,
    )


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether the module's direct weights are on the device only during its forward."""
    return forwarding.find(module, StreamedForward.tag) is not None


@contextmanager
def align_module_device(
    module: nn.Module, execution_device: Place | None = None
) -> Iterator[None]:
    """Context manager in which the module's direct parameters are on `execution_device`; changes to them are stored.

    Without a device, offloaded parameters move to their compute device, and others stay.
    """
    streamers = streamers_of(module)
    target = device_of(execution_device) if execution_device is not None else None
    if target is None and streamers:
        target = streamers[0].device
    if target is None:
        yield
        return
    before = {
        name: param for name, param in module._parameters.items() if param is not None
    }
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
        # changes through .data do not count otherwise
        increment_version(list(before.values()))


CASTABLE: Final = (
    *(
        nn.Conv1d,
        nn.Conv2d,
        nn.Conv3d,
        nn.ConvTranspose1d,
        nn.ConvTranspose2d,
        nn.ConvTranspose3d,
    ),
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
    patterns = (
        [skip_modules_pattern]
        if isinstance(skip_modules_pattern, str)
        else list(skip_modules_pattern or ())
    )

    def visit(part: nn.Module, name: str) -> None:
        skipped = isinstance(part, skip_modules_classes or ()) or any(
            re.search(one, name) for one in patterns
        )
        if skipped:
            return
        if isinstance(part, CASTABLE):
            add_hook_to_module(
                part,
                LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking),
                append=True,
            )
            return
        for child_name, child in part.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name)

    visit(module, "")


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove every hook, placement and streaming from a module and its submodules."""
    detach(module)
    remove_hook_from_module(module, recurse=True)
