"""Offloading by hooks: each module's weights are put in place for its forward and return to the meta device afterwards.

For models that compute on the CPU or the meta device, where streaming has nothing to copy. Arguments are those of the functions in `dispatch.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelerate._impl.models.align import (
    AlignDevicesHook,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
)
from hasten.extensions.bigmodel.device_map import OFFLOAD, owner_in, retie_parameters
from hasten.extensions.bigmodel.dispatch import Place
from hasten.extensions.bigmodel.offload_files import (
    OffloadedWeightsLoader,
    offload_state_dict,
)
from hasten.extensions.bigmodel.tensors import TiedMap
from hasten.extensions.bigmodel.units import tensors_in
from hasten.modules.hooks import add_hook_to_module
from hasten.modules.names import tied_groups


def cpu_offload(
    model: nn.Module,
    execution_device: Place,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: Collection[str] | None = None,
) -> nn.Module:
    weights = state_dict or {
        weight_name: weight.to("cpu")
        for weight_name, weight in model.state_dict().items()
    }
    return _offload_module(
        model, execution_device, weights, offload_buffers, preload_module_classes
    )


def disk_offload(
    model: nn.Module,
    offload_dir: str | Path,
    execution_device: Place,
    offload_buffers: bool = False,
    preload_module_classes: Collection[str] | None = None,
) -> nn.Module:
    """Return the model with its weights in files of `offload_dir`; those that the folder holds already are not written."""
    write_missing(model.state_dict(), offload_dir)
    weights = OffloadedWeightsLoader(save_folder=offload_dir)
    return _offload_module(
        model, execution_device, weights, offload_buffers, preload_module_classes
    )


def write_missing(
    state_dict: Mapping[str, Tensor], save_dir: str | Path, spare: Collection[str] = ()
) -> None:
    """Write the weights that the folder does not hold yet, or holds with other values; meta tensors are left out.

    Those in `spare`, which nobody reads from the folder, are written beside others only.
    """
    stored_weights = OffloadedWeightsLoader(save_folder=save_dir)
    filled = {
        tensor_name: tensor
        for tensor_name, tensor in state_dict.items()
        if not tensor.is_meta
    }
    unchanged_names = []
    for tensor_name, tensor in filled.items():
        if tensor_name in stored_weights and torch.equal(
            stored_weights[tensor_name], tensor.cpu()
        ):
            unchanged_names.append(tensor_name)
    missing_weights = {}
    for tensor_name, tensor in filled.items():
        if tensor_name not in unchanged_names:
            missing_weights[tensor_name] = tensor
    if not len(stored_weights) or not missing_weights.keys() <= set(spare):
        offload_state_dict(save_dir, missing_weights)


def _offload_module(
    model: nn.Module,
    device: Place,
    weights: Mapping[str, Tensor],
    buffers: bool,
    preloaded_classes: Collection[str] | None,
) -> nn.Module:
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(
        model, device, True, weights, buffers, preload_module_classes=preloaded_classes
    )
    return model


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Place],
    main_device: Place = "cpu",
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: str | Path = "",
    offload_buffers: bool = False,
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
) -> nn.Module:
    """Return the model with hooks on the modules of the map.

    Weights on "disk" are in files of `offload_dir`; those on "cpu" are in a state dict if the main device is another one.
    """
    offload_targets = {"disk"} if str(main_device) == "cpu" else set(OFFLOAD)
    offloaded_modules = {}
    devices = {}
    for module_name, module_device in device_map.items():
        offloaded_modules[module_name] = str(module_device) in offload_targets
        devices[module_name] = module_device
        if str(module_device) in OFFLOAD:
            devices[module_name] = main_device
    on_disk = {}
    on_host = {}
    for tensor_name, tensor in model.state_dict().items():
        owner = device_map.get(owner_in(device_map, tensor_name) or "")
        if owner == "disk":
            on_disk[tensor_name] = tensor
        elif str(owner) in offload_targets:
            on_host[tensor_name] = tensor
    if on_disk:
        write_missing(
            on_disk, offload_dir, () if offload_buffers else dict(model.named_buffers())
        )
    if state_dict is None:
        state_dict = on_host
    weights = None
    if any(offloaded_modules.values()):
        weights = OffloadedWeightsLoader(
            state_dict, offload_dir, None if on_disk else {}
        )
    groups = list(map(list, tied_groups(model)))
    ties: TiedMap = {model.get_parameter(names[0]).data_ptr(): {} for names in groups}
    options = (offload_buffers, "", skip_keys, preload_module_classes, ties)
    attach_align_device_hook_on_blocks(
        model, {"": main_device, **devices}, offloaded_modules, weights, *options
    )
    retie_parameters(model, groups)
    return model


# The same hooks as a plan, for models that are streamed: libraries ask a module for its hook to learn where it computes and
# whether its weights are offloaded. Of several entries for one module the first counts.
# Any: arguments of an AlignDevicesHook, devices as maps name them
Planned = tuple[nn.Module, dict[str, Any]]


def hooks_of_offloading(
    module: nn.Module, device: Any, options: Mapping[str, Any]
) -> Iterator[Planned]:
    """Yield a hook for every module that owns weights, or a single one for a module of the `preload_module_classes`.

    `options` are the keyword arguments of the function that offloads.
    """
    buffers, preloaded_classes = _chosen_options(options)
    is_one_unit = type(module).__name__ in preloaded_classes
    if is_one_unit or _has_tensors(module, recurse=False):
        flags = {
            "offload": True,
            "offload_buffers": buffers,
            "place_submodules": is_one_unit,
        }
        yield (
            module,
            {
                "execution_device": device,
                "skip_keys": options.get("skip_keys"),
                **flags,
            },
        )
    for child in () if is_one_unit else module.children():
        yield from hooks_of_offloading(child, device, options)


def hooks_of_map(
    model: nn.Module,
    device_map: Mapping[str, Any],
    main: Any,
    options: Mapping[str, Any],
) -> Iterator[Planned]:
    buffers, preloaded_classes = _chosen_options(options)
    streamed_targets = ("disk",) if str(main) == "cpu" else OFFLOAD
    for module_name, submodule in model.named_modules():
        if module_name not in device_map:
            continue
        module_device = device_map[module_name]
        streams = str(module_device) in streamed_targets
        device = main if streams else module_device
        if streams:
            yield from hooks_of_offloading(submodule, device, options)
        flags = {
            "offload_buffers": buffers and not streams,
            "place_submodules": not streams,
        }
        common = {"execution_device": device, "skip_keys": options.get("skip_keys")}
        yield submodule, {**common, "io_same_device": not module_name, **flags}
        yield from _hooks_of_computing(
            submodule, common, preloaded_classes if streams else ()
        )
    yield (
        model,
        {
            "execution_device": main,
            "skip_keys": options.get("skip_keys"),
            "io_same_device": True,
        },
    )


def _hooks_of_computing(
    module: nn.Module, common: dict[str, Any], preloaded_classes: Collection[str]
) -> Iterator[Planned]:
    """Yield a hook for every module with weights below, which moves its inputs to the device."""
    if _has_tensors(module, recurse=True):
        yield module, common
    for child in (
        () if type(module).__name__ in preloaded_classes else module.children()
    ):
        yield from _hooks_of_computing(child, common, preloaded_classes)


def _chosen_options(options: Mapping[str, Any]) -> tuple[bool, Collection[str]]:
    return bool(options.get("offload_buffers")), options.get(
        "preload_module_classes"
    ) or ()


def _has_tensors(module: nn.Module, recurse: bool) -> bool:
    return any(True for _ in tensors_in(module, "", buffers=True, recurse=recurse))
