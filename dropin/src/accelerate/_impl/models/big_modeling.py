"""Loading and placing big models, on hasten's placement and streaming."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from accelerate._impl.models.hooks import UserCpuOffloadHook, mirror, mirrored, show
from accelerate._impl.models.modeling import fill_model
from accelerate._impl.models.planning import check_device_map, get_balanced_memory, infer_auto_device_map
from accelerate._impl.surface.shown import like
from hasten.bigmodel import dispatch
from hasten.bigmodel import tensors as casting
from hasten.bigmodel.align import AlignDevicesHook
from hasten.bigmodel.device_map import owner_in
from hasten.modules.forwarding import is_dispatched
from hasten.modules.surgery import named_tensors

_log = logging.getLogger("accelerate.big_modeling")
# Any in this file: devices and maps in the many forms the established API takes.


@like(dispatch.cpu_offload)
def cpu_offload(model: nn.Module, execution_device: Any = None, *args: Any, **kwargs: Any) -> nn.Module:
    device = next(model.parameters()).device if execution_device is None else execution_device
    return _shown(dispatch.cpu_offload(model, device, *args, **kwargs), device)


@like(dispatch.cpu_offload_with_hook)
def cpu_offload_with_hook(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[nn.Module, UserCpuOffloadHook]:
    model, hook = dispatch.cpu_offload_with_hook(model, *args, **kwargs)
    mirror(model)
    return model, UserCpuOffloadHook(model, hook.hook)


@like(dispatch.disk_offload)
def disk_offload(
    model: nn.Module, offload_dir: Any, execution_device: Any = None, *args: Any, **kwargs: Any
) -> nn.Module:
    device = next(model.parameters()).device if execution_device is None else execution_device
    return _shown(dispatch.disk_offload(model, offload_dir, device, *args, **kwargs), device)


@like(dispatch.dispatch_model)
def dispatch_model(
    model: nn.Module, device_map: Mapping[str, Any], main_device: Any = None, *args: Any, **kwargs: Any
) -> nn.Module:
    check_device_map(model, device_map)
    homeless = [name for name, _ in named_tensors(model) if owner_in(dict(device_map), name) is None]
    places = {**device_map, **dict.fromkeys(homeless, "cpu")}  # whoever skips the check means them to stay
    _refuse_disk_without_folder(device_map, *args, **kwargs)
    dispatch.dispatch_model(model, places, main_device, *args, **kwargs)
    if is_dispatched(model):
        _tell_offloaded(device_map)
        _show_places(model, device_map, dispatch.main_device_of(places) if main_device is None else main_device)
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]  # an attribute that libraries look at
    return model


def _shown(model: nn.Module, device: Any) -> nn.Module:
    """The model, looking offloaded to libraries that look at its hooks."""
    mirror(model)
    if "_hf_hook" not in model.__dict__:
        show(model, AlignDevicesHook(device, io_same_device=True))
    return model


def _refuse_disk_without_folder(
    device_map: Mapping[str, Any],
    state: Any = None,
    offload_dir: Any = None,
    offload_index: Any = None,
    *_: Any,
    **__: Any,
) -> None:
    away = [name for name, place in device_map.items() if str(place) == "disk"]
    if away and offload_dir is None and offload_index is None:
        raise ValueError(
            f"We need an `offload_dir` to dispatch this model according to this `device_map`, the following submodules need to be offloaded: {', '.join(away)}."
        )


def _tell_offloaded(device_map: Mapping[str, Any]) -> None:
    away = [place for place in dict.fromkeys(map(str, device_map.values())) if place in ("cpu", "disk")]
    if away:
        _log.warning(f"Some parameters are on the meta device because they were offloaded to the {' and '.join(away)}.")


def _show_places(model: nn.Module, device_map: Mapping[str, Any], main: Any) -> None:
    _shown(model, main)
    for name, place in device_map.items():
        part = dict(model.named_modules()).get(name)
        if part is not None and "_hf_hook" not in part.__dict__:
            device = main if str(place) in ("cpu", "disk") else place
            show(part, AlignDevicesHook(device, place_submodules=True))


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | PathLike[str],
    device_map: Any = None,
    max_memory: Mapping[Any, Any] | None = None,
    no_split_module_classes: Any = None,
    offload_folder: str | Path | None = None,
    offload_buffers: bool = False,
    dtype: Any = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """The model with the weights of a checkpoint, every part where the map says."""
    places = _worked_out(model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers)
    loaded = fill_model(model, checkpoint, places, offload_folder, dtype, offload_buffers, None, strict)
    if places is None:
        return model
    index = dict(loaded.offload_index) or None
    options: tuple[Any, ...] = (index, offload_buffers, skip_keys, preload_module_classes, force_hooks)
    return dispatch_model(model, places, None, None, offload_folder, *options)


def _worked_out(model: nn.Module, ways: Any, limits: Any, no_split: Any, dtype: Any, offload_buffers: bool) -> Any:
    """Return the map itself, or one worked out in the named way."""
    if not isinstance(ways, str):
        return ways
    if ways not in ("auto", "balanced", "balanced_low_0", "sequential"):
        raise ValueError(
            "If passing a string for `device_map`, please choose 'auto', 'balanced', 'balanced_low_0' or 'sequential'."
        )
    if ways != "sequential":
        limits = get_balanced_memory(model, limits, no_split, dtype, low_zero=ways == "balanced_low_0")
    return infer_auto_device_map(model, limits, no_split, dtype, offload_buffers=offload_buffers)


attach_layerwise_casting_hooks = mirrored(casting.attach_layerwise_casting_hooks)
