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
from hasten.extensions.bigmodel.placed import (
    StreamedForward,
    end_dispatch,
    streamers_of,
)
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
    owner_module, tensor_key = parent_of(module, name)
    is_buffer = tensor_key in owner_module._buffers
    if is_buffer:
        current_tensor = owner_module._buffers[tensor_key]
    else:
        current_tensor = owner_module._parameters.get(tensor_key)
    if current_tensor is None:
        raise PrepareError(
            f"{type(owner_module).__name__} has no parameter or buffer {tensor_key!r} to put on {device}."
        )
    if current_tensor.is_meta and device.type != "meta" and value is None:
        raise PrepareError(
            f"{name} is on the meta device and has no values; pass `value` to put it on {device}."
        )
    if (
        value is not None
        and value.shape != current_tensor.shape
        and not (current_tensor.numel() == 0)
    ):
        raise PrepareError(
            f"{name} has shape {tuple(current_tensor.shape)}, but the given value has shape {tuple(value.shape)}; pass a "
            "value of the same shape."
        )
    source_tensor = current_tensor if value is None else value
    source_address = 0 if source_tensor.is_meta else source_tensor.data_ptr()
    shared_copy = None
    if tied is not None and source_address:
        shared_copy = tied.get(source_address, {}).get(device)
    with torch.no_grad():
        if shared_copy is None:
            moved_tensor: Any = source_tensor.to(
                device, dtype, non_blocking=non_blocking
            )
        else:
            moved_tensor = shared_copy
    if is_buffer:
        owner_module._buffers[tensor_key] = moved_tensor
        return
    needs_grad = current_tensor.requires_grad and moved_tensor.is_floating_point()
    if moved_tensor is not current_tensor and (
        shared_copy is None
        or not isinstance(moved_tensor, nn.Parameter)
        or moved_tensor.requires_grad != needs_grad
    ):
        tensor_class: Any = type(
            current_tensor
        )  # Any: a subclass with another constructor
        if tensor_class is nn.Parameter:
            options = {}
        else:
            options = _constructor_options(current_tensor)
        moved_tensor = tensor_class(moved_tensor, requires_grad=needs_grad, **options)
    if tied is not None and source_address in tied:
        tied[source_address][device] = moved_tensor
    owner_module._parameters[tensor_key] = moved_tensor


def _constructor_options(parameter: Tensor) -> dict[str, Any]:
    """Return the attributes of a parameter that its class takes as arguments."""
    class_arguments = signature(type(parameter)).parameters
    arguments = {}
    for name, attribute_value in parameter.__dict__.items():
        if name in class_arguments:
            arguments[name] = attribute_value
    return arguments


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
    target_device = None
    if execution_device is not None:
        target_device = device_of(execution_device)
    if target_device is None and streamers:
        target_device = streamers[0].device
    if target_device is None:
        yield
        return
    original_params = {}
    for name, param in module._parameters.items():
        if param is not None:
            original_params[name] = param
    try:
        for name, param in original_params.items():
            if param.device != target_device:
                set_tensor(module, name, target_device)
        yield
    finally:
        with torch.no_grad():
            for name, param in original_params.items():
                current_tensor = module._parameters.get(name)
                if current_tensor is not None and current_tensor is not param:
                    if not current_tensor.is_meta:
                        param.copy_(current_tensor)
                    module._parameters[name] = param
        # changes through .data do not count otherwise
        increment_version(list(original_params.values()))


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
    if isinstance(skip_modules_pattern, str):
        patterns = [skip_modules_pattern]
    else:
        patterns = list(skip_modules_pattern or ())

    def visit_module(submodule: nn.Module, name: str) -> None:
        skipped = isinstance(submodule, skip_modules_classes or ()) or any(
            re.search(skipped_pattern, name) for skipped_pattern in patterns
        )
        if skipped:
            return
        if isinstance(submodule, CASTABLE):
            add_hook_to_module(
                submodule,
                LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking),
                append=True,
            )
            return
        for child_name, child_module in submodule.named_children():
            visit_module(child_module, f"{name}.{child_name}" if name else child_name)

    visit_module(module, "")


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove every hook, placement and streaming from a module and its submodules."""
    end_dispatch(module)
    remove_hook_from_module(module, recurse=True)
