"""Hooks that Accelerate attaches to an offloaded model, as a plan: hasten streams such models without hooks.

Libraries ask a module for its hook to learn where it computes and whether its weights are offloaded. The plan names modules
and the arguments of an `AlignDevicesHook`; of several entries for one module the first counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

from hasten.bigmodel.device_map import OFFLOAD
from hasten.bigmodel.units import tensors_in

Planned = tuple[nn.Module, dict[str, Any]]  # Any: arguments of a hook


def hooks_of_offloading(module: nn.Module, device: Any, options: Mapping[str, Any]) -> Iterator[Planned]:
    """Yield a hook for every module that owns weights, or a single one for a module of the `preload_module_classes`.

    `options` are the keyword arguments of the function that offloads.
    """
    buffers, whole = _chosen(options)
    together = type(module).__name__ in whole
    if together or _has_tensors(module, recurse=False):
        flags = {"offload": True, "offload_buffers": buffers, "place_submodules": together}
        yield module, {"execution_device": device, **flags}
    for child in () if together else module.children():
        yield from hooks_of_offloading(child, device, options)


def hooks_of_map(
    model: nn.Module, device_map: Mapping[str, Any], main: Any, options: Mapping[str, Any]
) -> Iterator[Planned]:
    """Yield the hooks of a model placed by a map, in which `main` computes for the offloaded modules."""
    buffers, whole = _chosen(options)
    away = ("disk",) if str(main) == "cpu" else OFFLOAD
    for name, part in model.named_modules():
        if name not in device_map:
            continue
        place = device_map[name]
        streams = str(place) in away
        device = main if streams else place
        if streams:
            yield from hooks_of_offloading(part, device, options)
        flags = {"offload_buffers": buffers and not streams, "place_submodules": not streams}
        yield part, {"execution_device": device, "io_same_device": not name, **flags}
        yield from _hooks_of_computing(part, device, whole if streams else ())
    yield model, {"execution_device": main, "io_same_device": True}


def _hooks_of_computing(module: nn.Module, device: Any, whole: Collection[str]) -> Iterator[Planned]:
    """Yield a hook for every module with weights below, which moves its inputs to the device."""
    if _has_tensors(module, recurse=True):
        yield module, {"execution_device": device}
    for child in () if type(module).__name__ in whole else module.children():
        yield from _hooks_of_computing(child, device, whole)


def _chosen(options: Mapping[str, Any]) -> tuple[bool, Collection[str]]:
    return bool(options.get("offload_buffers")), options.get("preload_module_classes") or ()


def _has_tensors(module: nn.Module, recurse: bool) -> bool:
    return any(True for _ in tensors_in(module, "", buffers=True, recurse=recurse))
