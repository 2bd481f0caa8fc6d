"""What other libraries see of a module with a hook: attributes, the forward's name and signature, weights at rest."""

import inspect

import torch
from torch import nn

from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    attach_align_device_hook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accelerate.utils import align_module_device, set_module_tensor_to_device


def seen(module):
    hook = getattr(module, "_hf_hook", None)
    return [
        type(hook).__name__,
        [type(inner_hook).__name__ for inner_hook in getattr(hook, "hooks", [])],
        hasattr(module, "_old_forward"),
        module.forward.__name__,
        str(inspect.signature(module.forward)),
        [str(parameter.device) for parameter in module.parameters()],
    ]


def message(work, *args, **kwargs):
    try:
        return work(*args, **kwargs)
    except ValueError as error:
        return str(error)


def run() -> object:
    module = nn.Linear(2, 3)
    observations = [seen(add_hook_to_module(module, ModelHook()))]
    observations.append(seen(add_hook_to_module(module, ModelHook(), append=True)))
    observations.append(isinstance(module._hf_hook, SequentialHook))
    observations.append(seen(remove_hook_from_module(module)))
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    attach_align_device_hook(model, execution_device=torch.device("cpu"), offload=True)
    observations += [seen(layer) for layer in model]
    with align_module_device(model[0]):
        observations.append(seen(model[0]))
    with align_module_device(model[0], execution_device="meta"):
        observations.append(seen(model[0]))
    observations.append(seen(model[0]))
    remove_hook_from_submodules(model)
    observations += [seen(layer) for layer in model]
    observations.append(repr(AlignDevicesHook("cpu", skip_keys="cache")))
    meta = nn.Linear(2, 3, device="meta")
    observations.append(message(set_module_tensor_to_device, meta, "weight", "cpu"))
    observations.append(
        message(set_module_tensor_to_device, meta, "weight", "cpu", value=torch.ones(1))
    )
    observations.append(message(set_module_tensor_to_device, meta, "other", "cpu"))
    set_module_tensor_to_device(meta, "weight", "cpu", value=torch.ones(3, 2).half())
    return [*observations, str(meta.weight.dtype)]


PROCESSES = (1,)
