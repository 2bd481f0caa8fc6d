"""Loading and placing big models, on hasten's placement and streaming."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from torch import Tensor, nn

from accelerate._impl.models.hooks import mirror, mirrored
from accelerate._impl.models.modeling import as_paths, check_device_map, load_checkpoint_in_model
from hasten.bigmodel import casting, dispatch, turns
from hasten.bigmodel.align import AlignDevicesHook
from hasten.bigmodel.device_map import owner_in
from hasten.bigmodel.load import work_out
from hasten.bigmodel.turns import UserCpuOffloadHook
from hasten.modules.sizes import named_tensors

# Any in this file: devices and maps in the many forms the established API takes.


def cpu_offload(
    model: nn.Module,
    execution_device: Any = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """The model with its weights on the host, streamed to a device block by block."""
    device = execution_device if execution_device is not None else next(model.parameters()).device
    dispatch.cpu_offload(model, device, offload_buffers, state_dict, preload_module_classes)
    return _shown(model, device)


def cpu_offload_with_hook(
    model: nn.Module, execution_device: Any = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """The model, on the device from its call until its hook, or the next model's, sends it back."""
    model, hook = turns.cpu_offload_with_hook(model, execution_device, prev_module_hook)
    mirror(model)
    return model, hook


def disk_offload(
    model: nn.Module,
    offload_dir: str | PathLike[str],
    execution_device: Any = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """The model with its weights in files, streamed to a device block by block."""
    device = execution_device if execution_device is not None else next(model.parameters()).device
    dispatch.disk_offload(model, str(offload_dir), device, offload_buffers, preload_module_classes)
    return _shown(model, device)


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Any],
    main_device: Any = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: str | PathLike[str] | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """The model with every part where the map says."""
    check_device_map(model, device_map)
    homeless = [name for name, _ in named_tensors(model) if owner_in(dict(device_map), name) is None]
    places = {**device_map, **dict.fromkeys(homeless, "cpu")}  # whoever skips the check means them to stay
    options: tuple[Any, ...] = (offload_index, offload_buffers, skip_keys, preload_module_classes, force_hooks)
    dispatch.dispatch_model(model, places, main_device, state_dict, as_paths(offload_dir), *options)
    if dispatch.is_dispatched(model):
        _show_places(model, device_map, dispatch.main_device_of(places) if main_device is None else main_device)
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]  # an attribute that libraries look at
    return model


def _shown(model: nn.Module, device: Any) -> nn.Module:
    """The model, looking offloaded to libraries that look at its hooks, and not movable as a whole."""
    mirror(model)
    if "_hf_hook" not in model.__dict__:
        model.__dict__["_hf_hook"] = AlignDevicesHook(device, io_same_device=True)
    for name in ("to", "cuda"):
        model.__dict__[name] = _Immovable(model, name)
    return model


def _show_places(model: nn.Module, device_map: Mapping[str, Any], main: Any) -> None:
    _shown(model, main)
    for name, place in device_map.items():
        part = dict(model.named_modules()).get(name)
        if part is not None and "_hf_hook" not in part.__dict__:
            device = main if str(place) in ("cpu", "disk") else place
            part.__dict__["_hf_hook"] = AlignDevicesHook(device, place_submodules=True)


class _Immovable:
    """Refuses to move a model of which parts are elsewhere; lets dtypes through."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model = model
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method = getattr(type(self.model), self.name)
        if not dispatch.is_dispatched(self.model):
            return method(self.model, *args, **kwargs)
        raise RuntimeError(
            f"You can't move a model that has some modules offloaded to cpu or disk or on several devices (.{self.name}()). "
            "Take the hooks off first: accelerate.hooks.remove_hook_from_submodules(model)."
        )


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | PathLike[str],
    device_map: Any = None,
    max_memory: Mapping[Any, Any] | None = None,
    no_split_module_classes: Any = None,
    offload_folder: str | PathLike[str] | None = None,
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
    places = work_out(model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers)
    loaded = load_checkpoint_in_model(
        model, checkpoint, places, offload_folder, dtype, offload_buffers=offload_buffers, strict=strict
    )
    if places is None:
        return model
    index = dict(loaded.offload_index) or None
    options: tuple[Any, ...] = (index, offload_buffers, skip_keys, preload_module_classes, force_hooks)
    return dispatch_model(model, places, None, None, as_paths(offload_folder), *options)


attach_layerwise_casting_hooks = mirrored(casting.attach_layerwise_casting_hooks)
