"""Single tensors of a module: put on a device, brought there for a while, asked whether they are offloaded."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from hasten.bigmodel.align import AlignDevicesHook, set_tensor
from hasten.bigmodel.device_map import DType, as_dtype
from hasten.bigmodel.dispatch import Place, device_of
from hasten.bigmodel.placed import StreamedForward, streamers_of
from hasten.modules import forwarding
from hasten.modules.hooks import SequentialHook, hook_of


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Place,
    value: Tensor | None = None,
    dtype: DType = None,
    tied_params_map: MutableMapping[int, dict[torch.device, Tensor]] | None = None,
    non_blocking: bool = False,
) -> None:
    """Put the parameter or buffer `tensor_name` of a module on a device, with another value or dtype if given."""
    set_tensor(module, tensor_name, device_of(device), value, as_dtype(dtype), non_blocking, tied_params_map)


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether the module's own weights come to the device for its forward only."""
    hook = hook_of(module)
    hooks = hook.hooks if isinstance(hook, SequentialHook) else [hook]
    if any(isinstance(one, AlignDevicesHook) and one.offload for one in hooks):
        return True
    return forwarding.find(module, StreamedForward.tag) is not None


@contextmanager
def align_module_device(module: nn.Module, execution_device: Place | None = None) -> Iterator[None]:
    """Context manager in which the module's own parameters are on `execution_device`; changes of them are kept.

    Without a device, offloaded parameters come to where they are computed with, and others stay.
    """
    hook = hook_of(module)
    if isinstance(hook, AlignDevicesHook) and hook.offload:
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
                module._parameters[name] = nn.Parameter(param.detach().to(target), param.requires_grad)
        yield
    finally:
        with torch.no_grad():
            for name, param in before.items():
                now = module._parameters.get(name)
                if now is not None and now is not param:
                    param.copy_(now)
                    module._parameters[name] = param
        increment_version(list(before.values()))  # what the block did to .data does not count otherwise
