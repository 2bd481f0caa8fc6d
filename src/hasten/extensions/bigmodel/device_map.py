"""Device maps, which assign a device to each module: computed, checked and shortened."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from hasten.checkpoint.export import parse_size
from hasten.errors import ConfigError
from hasten.extensions.bigmodel.placement_plan import (
    Atom,
    Device,
    Node,
    atoms,
    balanced,
    place,
    readable,
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
        return {key: int(_SHARE * free) for key, free in free_memory().items()}
    limits = {_key(key): parse_size(size) for key, size in max_memory.items()}
    known = {*range(_num_devices()), "cpu", "disk", "mps"}
    for key in limits:
        if key not in known:
            devices = (
                ", ".join(str(index) for index in range(_num_devices()))
                or "no accelerator"
            )
            raise ConfigError(
                f"max_memory names device {key!r}, which this machine does not have ({devices}, 'cpu', 'disk'). "
                "Name devices by their index, or remove the entry."
            )
    return dict(sorted(limits.items(), key=lambda item: device_order(item[0])))


def _key(key: DeviceKey) -> DeviceKey:
    if isinstance(key, str) and key.isdigit():
        return int(key)
    if isinstance(key, str) and ":" in key:
        return torch.device(key).index
    return key


def device_order(key: DeviceKey) -> tuple[int, int]:
    """Return the place of a device in a map: accelerators by number, then "mps", "cpu" and "disk"."""
    return (
        (0, key) if isinstance(key, int) else (("mps", "cpu", "disk").index(key) + 1, 0)
    )


def _num_devices() -> int:
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def free_memory(unified: bool = False) -> dict[DeviceKey, int]:
    """Return the bytes that are free now on every accelerator and on the host; `unified` memory is under "mps" alone."""
    if unified:
        return {"mps": free_host_bytes()}
    return {
        **{index: _free(index) for index in range(_num_devices())},
        "cpu": free_host_bytes(),
    }


def _free(index: int) -> int:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None, "there is an accelerator"
    module = torch.get_device_module(kind)
    if hasattr(module, "mem_get_info"):
        return int(module.mem_get_info(index)[0])
    return free_host_bytes()  # devices that share the host's memory


log = logging.getLogger(__name__)
OFFLOAD = ("cpu", "disk")
WAYS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Names of the ways to work out a map."""
DType = torch.dtype | str | None


def as_dtype(dtype: DType) -> torch.dtype | None:
    """Return a dtype given as a dtype or by name ("bfloat16", "torch.float16")."""
    if isinstance(dtype, str):
        found = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(found, torch.dtype):
            raise ConfigError(
                f"{dtype!r} is not a torch dtype; write for example 'bfloat16'."
            )
        return found
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
    parts = atoms(tree(model, no_split_module_classes, dtype))
    devices = devices_in_order(get_max_memory(max_memory))
    if not offload_buffers:
        devices = _without_buffers(devices, parts, model, dtype)
    placement = place(parts, devices)
    used = {key: readable(size) for key, size in placement.used.items() if size}
    log.info(
        "device map: %s; %s of the first device are reserved for offloaded modules",
        used,
        readable(placement.reserved),
    )
    return clean_device_map(dict(placement.places))


def devices_in_order(limits: Mapping[DeviceKey, int]) -> list[Device]:
    """Return the devices to fill, in order; devices that only store weights are marked as offload, and the disk is last.

    Without an accelerator the CPU computes, and only the disk is an offload device.
    """
    accelerators = [key for key in limits if key not in OFFLOAD and limits[key] > 0]
    devices = [Device(key, limits[key]) for key in accelerators]
    if "cpu" in limits:
        devices.append(Device("cpu", limits["cpu"], offload=bool(accelerators)))
    elif not accelerators:
        raise ConfigError(
            f"max_memory {dict(limits)} contains no device that can compute; add 'cpu' or an accelerator."
        )
    devices.append(Device("disk", limits.get("disk"), offload=True))
    return devices


def _without_buffers(
    devices: list[Device], parts: Sequence[Atom], model: nn.Module, dtype: DType
) -> list[Device]:
    """Return the devices, the first computing one without the bytes of offloaded modules' buffers, which stay there."""
    main = next((device for device in devices if not device.offload), None)
    if main is None or main.limit is None:
        return devices
    offloaded = {device.key for device in devices if device.offload}
    places = place(parts, devices).places
    prefixes = tuple(f"{name}." for name, key in places.items() if key in offloaded)
    buffer_bytes = sum(
        tensor_bytes(buffer, as_dtype(dtype))
        for name, buffer in model.named_buffers()
        if name.startswith(prefixes) or places.get(name) in offloaded
    )
    reduced = replace(main, limit=max(main.limit - buffer_bytes, 0))
    return [reduced if device is main else device for device in devices]


def tree(
    model: nn.Module,
    no_split: Collection[str] | str | None = None,
    dtype: DType = None,
) -> Iterator[Node]:
    """Yield the model's modules as nodes for the solver, with sizes, shared tensors and splittable children."""
    whole = frozenset([no_split] if isinstance(no_split, str) else no_split or ())
    stored_dtype = as_dtype(dtype)

    def size(tensor: Tensor) -> tuple[int, int]:
        return id(tensor), tensor_bytes(tensor, stored_dtype)

    def visit(prefix: str, module: nn.Module) -> Iterator[Node]:
        dot = f"{prefix}." if prefix else ""
        own = [*module._parameters.items(), *module._buffers.items()]
        yield from (
            Node(dot + n, frozenset([size(t)])) for n, t in own if t is not None
        )
        for name, child in module._modules.items():
            if child is None:
                continue
            held = frozenset(size(tensor) for _, tensor in named_tensors(child))
            if not held:
                continue
            splits = (
                any(True for _ in child.children())
                and type(child).__name__ not in whole
            )
            yield Node(
                dot + name, held, tuple(visit(dot + name, child)) if splits else ()
            )

    if type(model).__name__ in whole:
        yield Node("", frozenset(size(tensor) for _, tensor in named_tensors(model)))
    else:
        yield from visit("", model)


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[DeviceKey, float | str] | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: DType = None,
    low_zero: bool = False,
) -> dict[DeviceKey, int]:
    """Return limits that spread the model evenly over the accelerators; `low_zero` leaves the first one to other work."""
    limits = get_max_memory(max_memory)
    accelerators = [key for key in limits if key not in OFFLOAD and limits[key] > 0]
    parts = atoms(tree(model, no_split_module_classes, dtype))
    fair = balanced(parts, [limits[key] for key in accelerators], low_zero)
    return {**limits, **dict(zip(accelerators, fair, strict=True))}


def clean_device_map(
    device_map: dict[str, DeviceKey], module_name: str = ""
) -> dict[str, DeviceKey]:
    """Return the map with a module in place of its submodules wherever these all share a device."""
    prefix = f"{module_name}." if module_name else ""
    inside = [name for name in device_map if name.startswith(prefix)]
    if len(inside) > 1 and len({device_map[name] for name in inside}) == 1:
        key = device_map[inside[0]]
        short = {}
        for name, place_ in device_map.items():
            if name == inside[0]:
                short[module_name] = key
            if not name.startswith(prefix):
                short[name] = place_
        return short
    depth = len(prefix.split(".")) if prefix else 1
    children = dict.fromkeys(
        ".".join(name.split(".")[:depth]) for name in inside if name != module_name
    )
    for child in children:
        device_map = clean_device_map(device_map, child) if child else device_map
    return device_map


def check_device_map(
    model: nn.Module, device_map: Mapping[str, DeviceKey | torch.device]
) -> None:
    """Raise unless every tensor of the model has a device, and every name of the map exists in the model."""
    tensors = [name for name, _ in named_tensors(model)]
    unplaced = [name for name in tensors if owner_in(device_map, name) is None]
    if unplaced:
        raise ConfigError(
            f"the device map has no entry for {_few(unplaced)}, so the model could not run. Add an entry "
            "for each, or for the whole model under the name ''."
        )
    known = {name for name, _ in model.named_modules(remove_duplicate=False)} | set(
        tensors
    )
    unknown = [name for name in device_map if name not in known]
    if unknown:
        raise ConfigError(
            f"the device map names {_few(unknown)}, which {type(model).__name__} does not have; the entries would have no effect. Use "
            "names from model.named_modules()."
        )


def owner_in(device_map: Mapping[str, object], name: str) -> str | None:
    """Return the longest entry of the map that contains `name`, or None."""
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return name if name in device_map else None


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (
        f" and {len(names) - 3} more" if len(names) > 3 else ""
    )


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the groups of names that refer to the same parameter."""
    return [sorted(group) for group in tied_groups(model)]


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Make the names of each group refer to one parameter again, the one that is not on the meta device."""
    for group in tied_params:
        kept = next(
            (
                tensor
                for name in group
                if not (tensor := tensor_of(model, name)).is_meta
            ),
            None,
        )
        if kept is None:
            continue
        for name in group:
            owner, last = parent_of(model, name)
            table = owner._parameters if last in owner._parameters else owner._buffers
            table[last] = kept  # type: ignore[assignment]  # a parameter in the one table, a buffer in the other


def tensor_of(model: nn.Module, name: str) -> Tensor:
    """Return the parameter or buffer called `name`."""
    owner, last = parent_of(model, name)
    found = owner._parameters.get(last)
    if found is None:
        found = owner._buffers.get(last)  # type: ignore[assignment]
    if found is None:
        raise AttributeError(
            f"{type(owner).__name__} has no parameter or buffer {last!r}"
        )
    return found
