"""Context managers that build a model without weights, or with its weights on one device."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hasten.errors import PrepareError
from hasten.trees import tensors


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Context manager that creates the parameters of new modules on the meta device, without allocating memory.

    Buffers are computed as usual, since a checkpoint may not hold them; with `include_buffers` they are on meta too.
    A forward of such a module on real inputs raises until its weights are loaded.
    """
    built_modules: dict[int, nn.Module] = {}
    with _placed(torch.device("meta"), bool(include_buffers), built_modules):
        yield
    for module in built_modules.values():
        module.register_forward_pre_hook(refuse_meta, with_kwargs=True)


@contextmanager
def init_on_device(
    device: torch.device | str | int, include_buffers: bool | None = None
) -> Iterator[None]:
    """Context manager that creates the parameters of new modules, with `include_buffers` also buffers, on `device`."""
    with _placed(torch.device(device), bool(include_buffers), {}):
        yield


@contextmanager
def _placed(
    device: torch.device, include_buffers: bool, built_modules: dict[int, nn.Module]
) -> Iterator[None]:
    register_parameter = nn.Module.register_parameter
    register_buffer = nn.Module.register_buffer
    # One parameter for all names of a tied one. Replaced parameters are freed, so the whole model never takes memory.
    moved_params: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register_parameter(module, name, param)
        if param is None:
            return
        built_modules[id(module)] = module
        moved_param = moved_params.get(id(param))
        # Python reuses the ids of freed objects
        if moved_param is None or moved_param[0]() is not param:
            param_on_device = param if param.device == device else _like(param, device)
            moved_param = moved_params[id(param)] = (
                weakref.ref(param),
                param_on_device,
            )
            moved_params[id(param_on_device)] = (
                weakref.ref(param_on_device),
                param_on_device,
            )
        module._parameters[name] = moved_param[1]

    def buffer(
        module: nn.Module, name: str, tensor: Tensor | None, persistent: bool = True
    ) -> None:
        register_buffer(module, name, tensor, persistent=persistent)
        if tensor is not None:
            module._buffers[name] = tensor.to(device)

    nn.Module.register_parameter = parameter  # type: ignore[assignment,method-assign]
    if include_buffers:
        nn.Module.register_buffer = buffer  # type: ignore[assignment,method-assign]
    try:
        if include_buffers:
            with device:
                yield
        else:
            yield
    finally:
        nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
        nn.Module.register_buffer = register_buffer  # type: ignore[method-assign]


def _like(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return the parameter on another device, of the same class and with the same attributes."""
    attributes = dict(param.__dict__)
    param_class = type(param)
    if param_class is nn.Parameter:
        new_param = nn.Parameter(
            param.detach().to(device), requires_grad=param.requires_grad
        )
    else:
        new_param = param_class(
            param.detach().to(device), requires_grad=param.requires_grad
        )
    new_param.__dict__.update(attributes)
    return new_param


class _EmptyWeightsError(PrepareError, RuntimeError):
    """Error for a forward with weights on the meta device; torch's own error for it is a RuntimeError."""


def refuse_meta(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise in a forward pre-hook if real inputs meet meta weights; the hook removes itself once the weights are loaded."""
    if "forward" in module.__dict__:
        return  # the replacement of the forward may load the weights itself
    meta_params = [
        param_name
        for param_name, param in module._parameters.items()
        if param is not None and param.is_meta
    ]
    if meta_params:
        if any(not tensor.is_meta for tensor in tensors((args, kwargs))):
            raise _EmptyWeightsError(
                f"{type(module).__name__} was called, but its {meta_params[0]} was built on the meta device and has no values. Load the "
                "weights first: load_checkpoint_and_dispatch(model, folder, device_map='auto'), "
                "load_checkpoint_in_model(model, folder), or model.to_empty(device=...) and an initialisation."
            )
        return
    if not torch.compiler.is_compiling():
        for hook_key, hook in list(module._forward_pre_hooks.items()):
            if hook is refuse_meta:
                del module._forward_pre_hooks[hook_key]
                module._forward_pre_hooks_with_kwargs.pop(hook_key, None)


def meta_names(model: nn.Module) -> list[str]:
    """Return the names of parameters and buffers that are still on the meta device."""
    named_weights = [*model.named_parameters(), *model.named_buffers()]
    return [weight_name for weight_name, tensor in named_weights if tensor.is_meta]
