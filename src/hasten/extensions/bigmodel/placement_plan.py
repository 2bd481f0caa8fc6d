"""Assignment of a model's modules to devices: a pure function from sizes and limits to a placement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hasten.errors import ConfigError

STREAMED_AT_ONCE = 2
"""Number of offloaded modules on the device at the same time: one computes while the next one is copied."""


@dataclass(frozen=True, slots=True)
class Node:
    """A module, parameter or buffer: its tensors by identity with their bytes, and the nodes it can be split into."""

    name: str
    tensors: frozenset[tuple[int, int]]
    parts: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Device:
    """A device and the bytes it may hold; None means no limit. Offload devices compute nothing."""

    key: int | str
    limit: int | None
    offload: bool = False


@dataclass(frozen=True, slots=True)
class ModuleGroup:
    """Modules that stay together: one that is never split, with those that share tensors with it."""

    names: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class DevicePlacement:
    """Device of each module, and the bytes used on each device and reserved on the first."""

    places: dict[str, int | str]
    used: dict[int | str, int]
    reserved: int = 0


def group_modules(nodes: Iterable[Node]) -> list[ModuleGroup]:
    """Return the unsplittable modules in the model's order; modules that share tensors form one atom, at the first's position."""
    groups: list[tuple[list[str], dict[int, int]]] = []
    for leaf in _leaf_nodes(nodes):
        tensor_sizes = dict(leaf.tensors)
        merged_group: tuple[list[str], dict[int, int]] = ([], {})
        remaining_groups = []
        for group in groups:
            if group[1].keys() & tensor_sizes.keys():
                if not merged_group[0]:
                    remaining_groups.append(merged_group)
                merged_group[0].extend(group[0])
                merged_group[1].update(group[1])
            else:
                remaining_groups.append(group)
        if not merged_group[0]:
            remaining_groups.append(merged_group)
        merged_group[0].append(leaf.name)
        merged_group[1].update(tensor_sizes)
        groups = remaining_groups
    return [ModuleGroup(tuple(names), sum(sizes.values())) for names, sizes in groups]


def _leaf_nodes(nodes: Iterable[Node]) -> Iterable[Node]:
    for node in nodes:
        if node.parts:
            yield from _leaf_nodes(node.parts)
        else:
            yield node


def place_modules(
    module_groups: Sequence[ModuleGroup], devices: Sequence[Device]
) -> DevicePlacement:
    """Fill the devices one after another, in the model's order, so that data crosses each device boundary once.

    If modules are left for offload devices, the first computing device reserves memory to stream them.
    Raises: ConfigError with the missing bytes if the devices cannot hold the model.
    """
    reserve = 0
    device_indices = _fill_devices(module_groups, devices, reserve)
    while True:
        spilled_sizes = []
        for module_group, device_index in zip(
            module_groups, device_indices, strict=False
        ):
            if devices[device_index].offload:
                spilled_sizes.append(module_group.num_bytes)
        needed_reserve = STREAMED_AT_ONCE * max(spilled_sizes, default=0)
        if needed_reserve <= reserve:
            break
        reserve = needed_reserve  # the reserve may spill a larger module, so repeat
        device_indices = _fill_devices(module_groups, devices, reserve)
    if len(device_indices) < len(module_groups):
        raise ConfigError(
            _explain_shortage(
                module_groups, devices, module_groups[len(device_indices) :]
            )
        )
    device_of_module: dict[str, int | str] = {}
    used_bytes: dict[int | str, int] = {device.key: 0 for device in devices}
    for module_group, device_index in zip(module_groups, device_indices, strict=True):
        key = devices[device_index].key
        used_bytes[key] += module_group.num_bytes
        device_of_module.update(dict.fromkeys(module_group.names, key))
    return DevicePlacement(device_of_module, used_bytes, reserve)


def _fill_devices(
    module_groups: Sequence[ModuleGroup], devices: Sequence[Device], reserve: int
) -> list[int]:
    """Return the device index of each module, up to the first module that no device can hold."""
    device_indices: list[int] = []
    for device_index, device in enumerate(devices):
        free_bytes = device.limit
        if free_bytes is not None and not device.offload:
            free_bytes -= reserve
            reserve = 0  # on the first computing device only
        for module_group in module_groups[len(device_indices) :]:
            if free_bytes is not None:
                if module_group.num_bytes > max(free_bytes, 0):
                    break
                free_bytes -= module_group.num_bytes
            device_indices.append(device_index)
    return device_indices


def _explain_shortage(
    module_groups: Sequence[ModuleGroup],
    devices: Sequence[Device],
    missing_groups: Sequence[ModuleGroup],
) -> str:
    total_bytes = sum(module_group.num_bytes for module_group in module_groups)
    missing_bytes = sum(module_group.num_bytes for module_group in missing_groups)
    limits_text = ", ".join(
        f"{device.key}: {'any' if device.limit is None else format_bytes(device.limit)}"
        for device in devices
    )
    largest_group = max(missing_groups, key=lambda module_group: module_group.num_bytes)
    return (
        f"the model needs {format_bytes(total_bytes)}, and with max_memory {{{limits_text}}} {format_bytes(missing_bytes)} of it do not fit ({len(missing_groups)} "
        f"modules; the largest, {largest_group.names[0]}, takes {format_bytes(largest_group.num_bytes)}). Nothing was "
        f"placed. Raise a limit by {format_bytes(missing_bytes)}, add 'disk', load in a smaller dtype, or allow "
        f"{largest_group.names[0]} to be split."
    )


def balance_limits(
    module_groups: Sequence[ModuleGroup],
    memory_limits: Sequence[int],
    low_first: bool = False,
) -> list[int]:
    """Return limits that spread the model evenly: the smallest common limit at which everything fits.

    With `low_first` the first device gets only the modules that the others cannot hold. The last device keeps its limit. If even
    the full limits do not hold the model, they are returned unchanged.
    """
    if low_first:
        spread_limits = memory_limits[1:]
    else:
        spread_limits = memory_limits
    if len(spread_limits) < 2 and not (low_first and len(memory_limits) > 1):
        return list(memory_limits)
    total_bytes = sum(module_group.num_bytes for module_group in module_groups)
    low_bytes = 0
    high_bytes = total_bytes
    while low_bytes < high_bytes:
        middle_bytes = (low_bytes + high_bytes) // 2
        if _fit_limits(
            module_groups, _cap_limits(memory_limits, middle_bytes, low_first)
        ):
            high_bytes = middle_bytes
        else:
            low_bytes = middle_bytes + 1
    capped_limits = _cap_limits(memory_limits, low_bytes, low_first)
    if not _fit_limits(module_groups, capped_limits):
        return list(memory_limits)
    if low_first:
        return [
            _smallest_first_limit(module_groups, capped_limits, memory_limits[0]),
            *capped_limits[1:],
        ]
    return [*capped_limits[:-1], memory_limits[-1]]


def _cap_limits(memory_limits: Sequence[int], cap: int, low_first: bool) -> list[int]:
    if not low_first:
        return [min(limit, cap) for limit in memory_limits]
    capped_limits = [min(limit, cap) for limit in memory_limits[1:]]
    return [memory_limits[0] if cap >= max(memory_limits[1:]) else 0, *capped_limits]


def _smallest_first_limit(
    module_groups: Sequence[ModuleGroup], capped_limits: Sequence[int], first_limit: int
) -> int:
    """Return the smallest limit of the first device at which everything fits."""
    if _fit_limits(module_groups, [0, *capped_limits[1:]]):
        return 0
    low_bytes = 0
    high_bytes = first_limit
    while low_bytes < high_bytes:
        middle_bytes = (low_bytes + high_bytes) // 2
        if _fit_limits(module_groups, [middle_bytes, *capped_limits[1:]]):
            high_bytes = middle_bytes
        else:
            low_bytes = middle_bytes + 1
    return low_bytes


def _fit_limits(
    module_groups: Sequence[ModuleGroup], memory_limits: Sequence[int]
) -> bool:
    devices = []
    for device_index, limit in enumerate(memory_limits):
        devices.append(Device(device_index, limit))
    return len(_fill_devices(module_groups, devices, 0)) == len(module_groups)


def format_bytes(num_bytes: int) -> str:
    """Return a number of bytes as readable text: "1.5 GB"."""
    size = float(num_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            if unit == "bytes":
                return f"{size:.0f} {unit}"
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"
