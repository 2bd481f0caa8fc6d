"""Device maps, which assign a device to each module: computed, checked and shortened."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hasten.checkpoint.export import parse_size
from hasten.errors import ConfigError
from hasten.extensions.bigmodel.placement_plan import (
    Device,
    ModuleGroup,
    Node,
    balance_limits,
    format_bytes,
    group_modules,
    place_modules,
)
from hasten.modules.names import tied_groups
from hasten.modules.surgery import module_bytes, named_tensors, parent_of, tensor_bytes
from hasten.runtime.host_pool import free_host_bytes

DeviceKey = int | str
_SHARE = 0.9  # of the memory that is free now; the rest is left to other programs


def get_max_memory(
    max_memory: Mapping[DeviceKey, float | str] | None = None,
) -> dict[DeviceKey, int]:
    """Return bytes per device, computing devices first, then "cpu" and "disk".

    The default is the memory that is free now on every accelerator and on the host. Sizes may be written "10GB" or "2GiB".
    Raises: ConfigError for a device that does not exist or an invalid size.
    """
    if max_memory is None:
        return {
            device_key: int(_SHARE * free) for device_key, free in free_memory().items()
        }
    memory_limits = {
        _normalize_key(device_key): parse_size(size)
        for device_key, size in max_memory.items()
    }
    valid_keys = {*range(_num_devices()), "cpu", "disk", "mps"}
    for device_key in memory_limits:
        if device_key not in valid_keys:
            device_names = (
                ", ".join(map(str, range(_num_devices()))) or "no accelerator"
            )
            raise ConfigError(
                f"max_memory names device {device_key!r}, which this machine does not have ({device_names}, 'cpu', 'disk'). "
                "Name devices by their index, or remove the entry."
            )
    return dict(sorted(memory_limits.items(), key=lambda item: device_order(item[0])))


def _normalize_key(device_key: DeviceKey) -> DeviceKey:
    if isinstance(device_key, str) and device_key.isdigit():
        return int(device_key)
    if isinstance(device_key, str) and ":" in device_key:
        return torch.device(device_key).index
    return device_key


def device_order(device_key: DeviceKey) -> tuple[int, int]:
    """Return the place of a device in a map: accelerators by number, then "mps", "cpu" and "disk"."""
    if isinstance(device_key, int):
        return (0, device_key)
    return (("mps", "cpu", "disk").index(device_key) + 1, 0)


def _num_devices() -> int:
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def free_memory(unified: bool = False) -> dict[DeviceKey, int]:
    """Return the bytes that are free now on every accelerator and on the host; `unified` memory is under "mps" alone."""
    if unified:
        return {"mps": free_host_bytes()}
    return {
        **{
            device_index: _free_device_bytes(device_index)
            for device_index in range(_num_devices())
        },
        "cpu": free_host_bytes(),
    }


def _free_device_bytes(device_index: int) -> int:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, "there is an accelerator"
    device_module = torch.get_device_module(accelerator)
    if hasattr(device_module, "mem_get_info"):
        return int(device_module.mem_get_info(device_index)[0])
    return free_host_bytes()  # devices that share the host's memory


log = logging.getLogger(__name__)
OFFLOAD = ("cpu", "disk")
MAP_METHODS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Names of the ways to work out a map."""
DType = torch.dtype | str | None


def as_dtype(dtype: DType) -> torch.dtype | None:
    """Return a dtype given as a dtype or by name ("bfloat16", "torch.float16")."""
    if isinstance(dtype, str):
        torch_dtype = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(torch_dtype, torch.dtype):
            raise ConfigError(
                f"{dtype!r} is not a torch dtype; write for example 'bfloat16'."
            )
        return torch_dtype
    return dtype


def compute_module_sizes(model: nn.Module, dtype: DType = None) -> dict[str, int]:
    """Return the bytes of each module, parameter and buffer by name; the whole model is under the empty name.

    Shared tensors count once in every module that holds them.
    """
    return module_bytes(model, as_dtype(dtype), {})


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[DeviceKey, float | str] | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: DType = None,
    offload_buffers: bool = False,
) -> dict[str, DeviceKey]:
    """Return a device for every module of the model: accelerators are filled in order, then "cpu", then "disk".

    Modules of `no_split_module_classes` are not split, tied weights stay together, and if modules are offloaded the first
    accelerator reserves memory to stream them.
    Raises: ConfigError with the missing bytes if the devices cannot hold the model.
    """
    module_groups = group_modules(module_nodes(model, no_split_module_classes, dtype))
    devices = devices_in_order(get_max_memory(max_memory))
    if not offload_buffers:
        devices = _without_buffers(devices, module_groups, model, dtype)
    module_placement = place_modules(module_groups, devices)
    used_sizes = {}
    for device_key, size in module_placement.used.items():
        if size:
            used_sizes[device_key] = format_bytes(size)
    log.info(
        "device map: %s; %s of the first device are reserved for offloaded modules",
        used_sizes,
        format_bytes(module_placement.reserved),
    )
    return clean_device_map(dict(module_placement.places))


def devices_in_order(memory_limits: Mapping[DeviceKey, int]) -> list[Device]:
    """Return the devices to fill, in order; devices that only store weights are marked as offload, and the disk is last.

    Without an accelerator the CPU computes, and only the disk is an offload device.
    """
    accelerator_keys = [
        device_key
        for device_key in memory_limits
        if device_key not in OFFLOAD and memory_limits[device_key] > 0
    ]
    devices = [
        Device(device_key, memory_limits[device_key]) for device_key in accelerator_keys
    ]
    if "cpu" in memory_limits:
        devices.append(
            Device("cpu", memory_limits["cpu"], offload=bool(accelerator_keys))
        )
    elif not accelerator_keys:
        raise ConfigError(
            f"max_memory {dict(memory_limits)} contains no device that can compute; add 'cpu' or an accelerator."
        )
    devices.append(Device("disk", memory_limits.get("disk"), offload=True))
    return devices


def _without_buffers(
    devices: list[Device],
    module_groups: Sequence[ModuleGroup],
    model: nn.Module,
    dtype: DType,
) -> list[Device]:
    """Return the devices, the first computing one without the bytes of offloaded modules' buffers, which stay there."""
    main_device = next((device for device in devices if not device.offload), None)
    if main_device is None or main_device.limit is None:
        return devices
    offload_keys = {device.key for device in devices if device.offload}
    device_of_module = place_modules(module_groups, devices).places
    offloaded_prefixes = []
    for buffer_name, device_key in device_of_module.items():
        if device_key in offload_keys:
            offloaded_prefixes.append(f"{buffer_name}.")

    buffer_bytes = sum(
        tensor_bytes(buffer, as_dtype(dtype))
        for buffer_name, buffer in model.named_buffers()
        if buffer_name.startswith(tuple(offloaded_prefixes))
        or device_of_module.get(buffer_name) in offload_keys
    )
    reduced_device = replace(
        main_device, limit=max(main_device.limit - buffer_bytes, 0)
    )
    devices = list(devices)
    devices[devices.index(main_device)] = reduced_device
    return devices


def module_nodes(
    model: nn.Module,
    no_split: Collection[str] | str | None = None,
    dtype: DType = None,
) -> Iterator[Node]:
    """Yield the model's modules as nodes for the solver, with sizes, shared tensors and splittable children."""
    unsplit_classes = frozenset(
        [no_split] if isinstance(no_split, str) else no_split or ()
    )
    stored_dtype = as_dtype(dtype)

    def sized_tensor(tensor: Tensor) -> tuple[int, int]:
        return id(tensor), tensor_bytes(tensor, stored_dtype)

    def visit_module(prefix: str, module: nn.Module) -> Iterator[Node]:
        name_prefix = ""
        if prefix:
            name_prefix = f"{prefix}."
        direct_tensors = [*module._parameters.items(), *module._buffers.items()]
        yield from (
            Node(name_prefix + tensor_name, frozenset([sized_tensor(direct_tensor)]))
            for tensor_name, direct_tensor in direct_tensors
            if direct_tensor is not None
        )
        for child_name, child in module._modules.items():
            if child is None:
                continue
            child_tensors = frozenset(
                sized_tensor(tensor) for _, tensor in named_tensors(child)
            )
            if not child_tensors:
                continue
            is_splittable = (
                any(True for _ in child.children())
                and type(child).__name__ not in unsplit_classes
            )
            child_path = name_prefix + child_name
            child_nodes = visit_module(child_path, child) if is_splittable else ()
            yield Node(child_path, child_tensors, tuple(child_nodes))

    if type(model).__name__ in unsplit_classes:
        yield Node(
            "", frozenset(sized_tensor(tensor) for _, tensor in named_tensors(model))
        )
    else:
        yield from visit_module("", model)


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[DeviceKey, float | str] | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: DType = None,
    low_zero: bool = False,
) -> dict[DeviceKey, int]:
    """Return limits that spread the model evenly over the accelerators; `low_zero` leaves the first one to other work."""
    memory_limits = get_max_memory(max_memory)
    accelerator_keys = []
    for device_key in memory_limits:
        if device_key not in OFFLOAD and memory_limits[device_key] > 0:
            accelerator_keys.append(device_key)
    module_groups = group_modules(module_nodes(model, no_split_module_classes, dtype))
    device_limits = [memory_limits[device_key] for device_key in accelerator_keys]
    balanced_limits = balance_limits(
        module_groups,
        device_limits,
        low_zero,
    )
    return {
        **memory_limits,
        **dict(zip(accelerator_keys, balanced_limits, strict=True)),
    }


def clean_device_map(
    device_map: dict[str, DeviceKey], module_name: str = ""
) -> dict[str, DeviceKey]:
    """Return the map with a module in place of its submodules wherever these all share a device."""
    name_prefix = f"{module_name}." if module_name else ""
    inner_names = [
        entry_name for entry_name in device_map if entry_name.startswith(name_prefix)
    ]
    if (
        len(inner_names) > 1
        and len({device_map[entry_name] for entry_name in inner_names}) == 1
    ):
        device_key = device_map[inner_names[0]]
        short_map = {}
        for entry_name, entry_device in device_map.items():
            if entry_name == inner_names[0]:
                short_map[module_name] = device_key
            if not entry_name.startswith(name_prefix):
                short_map[entry_name] = entry_device
        return short_map
    depth = 1
    if name_prefix:
        depth = len(name_prefix.split("."))
    child_names = dict.fromkeys(
        ".".join(entry_name.split(".")[:depth])
        for entry_name in inner_names
        if entry_name != module_name
    )
    for child_name in child_names:
        if child_name:
            device_map = clean_device_map(device_map, child_name)
        else:
            device_map = device_map
    return device_map


def check_device_map(
    model: nn.Module, device_map: Mapping[str, DeviceKey | torch.device]
) -> None:
    """Raise unless every tensor of the model has a device, and every name of the map exists in the model."""
    tensor_names = [entry_name for entry_name, _ in named_tensors(model)]
    unplaced_names = []
    for entry_name in tensor_names:
        if owner_in(device_map, entry_name) is None:
            unplaced_names.append(entry_name)
    if unplaced_names:
        raise ConfigError(
            f"the device map has no entry for {_list_names(unplaced_names)}, so the model could not run. Add an entry "
            "for each, or for the whole model under the name ''."
        )
    existing_names = {
        entry_name for entry_name, _ in model.named_modules(remove_duplicate=False)
    } | set(tensor_names)
    unknown_names = [name for name in device_map if name not in existing_names]
    if unknown_names:
        raise ConfigError(
            f"the device map names {_list_names(unknown_names)}, which {type(model).__name__} does not have; the entries would have no effect. Use "
            "names from model.named_modules()."
        )


def owner_in(device_map: Mapping[str, object], tensor_name: str) -> str | None:
    """Return the longest entry of the map that contains `name`, or None."""
    while tensor_name and tensor_name not in device_map:
        tensor_name = tensor_name.rpartition(".")[0]
    if tensor_name in device_map:
        return tensor_name
    return None


def _list_names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (
        f" and {len(names) - 3} more" if len(names) > 3 else ""
    )


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the groups of names that refer to the same parameter."""
    return list(map(sorted, tied_groups(model)))


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Make the names of each group refer to one parameter again, the one that is not on the meta device."""
    for tied_names in tied_params:
        shared_tensor = next(
            (
                tensor
                for tensor_name in tied_names
                if not (tensor := tensor_of(model, tensor_name)).is_meta
            ),
            None,
        )
        if shared_tensor is None:
            continue
        for tensor_name in tied_names:
            owner_module, tensor_key = parent_of(model, tensor_name)
            # a parameter in the one table, a buffer in the other: typed Any for both
            table: dict[str, Any] = owner_module._buffers
            if tensor_key in owner_module._parameters:
                table = owner_module._parameters
            table[tensor_key] = shared_tensor


def tensor_of(model: nn.Module, tensor_name: str) -> Tensor:
    """Return the parameter or buffer called `name`."""
    owner_module, tensor_key = parent_of(model, tensor_name)
    stored_tensor = owner_module._parameters.get(tensor_key)
    if stored_tensor is None:
        stored_tensor = owner_module._buffers.get(tensor_key)  # type: ignore[assignment]
    if stored_tensor is None:
        raise AttributeError(
            f"{type(owner_module).__name__} has no parameter or buffer {tensor_key!r}"
        )
    return stored_tensor
