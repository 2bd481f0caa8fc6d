"""Offloading by hooks: each module's weights are put in place for its forward and return to the meta device afterwards.

For models that compute on the CPU, where streaming has nothing to copy. Arguments are those of the functions in `dispatch.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor, nn

from hasten.bigmodel.align import (
    AlignDevicesHook,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
)
from hasten.bigmodel.dispatch import Place
from hasten.bigmodel.offload_files import OffloadedWeightsLoader, write_missing
from hasten.modules.hooks import add_hook_to_module


def cpu_offload(
    model: nn.Module,
    execution_device: Place,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: Collection[str] | None = None,
) -> nn.Module:
    """Return the model with its weights in `state_dict`, or in a state dict of its own."""
    weights = state_dict or {name: weight.to("cpu") for name, weight in model.state_dict().items()}
    return _offload(model, execution_device, weights, offload_buffers, preload_module_classes)


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
    return _offload(model, execution_device, weights, offload_buffers, preload_module_classes)


def _offload(
    model: nn.Module, device: Place, weights: Mapping[str, Tensor], buffers: bool, whole: Collection[str] | None
) -> nn.Module:
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(model, device, True, weights, buffers, preload_module_classes=whole)
    return model


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Place],
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: str | Path = "",
    offload_buffers: bool = False,
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
) -> nn.Module:
    """Return the model with hooks on the modules of the map, which are on the CPU or offloaded to files of `offload_dir`."""
    away = [name for name, place in device_map.items() if str(place) == "disk"]
    weights = None
    if away:
        parts = tuple(f"{name}." for name in away)
        state = {name: one for name, one in model.state_dict().items() if "" in away or f"{name}.".startswith(parts)}
        write_missing(state, offload_dir)
        weights = OffloadedWeightsLoader(state_dict or {}, offload_dir)
    devices = {**dict.fromkeys(device_map, "cpu"), "": "cpu"}
    offload = {name: name in away for name in device_map}
    options = (offload_buffers, "", skip_keys, preload_module_classes)
    attach_align_device_hook_on_blocks(model, devices, offload, weights, *options)
    return model
