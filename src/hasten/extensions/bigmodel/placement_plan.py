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
class Atom:
    """Modules that stay together: one that is never split, with those that share tensors with it."""

    names: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class DevicePlacement:
    """Device of each module, and the bytes used on each device and reserved on the first."""

    places: dict[str, int | str]
    used: dict[int | str, int]
    reserved: int = 0


def atoms(nodes: Iterable[Node]) -> list[Atom]:
    """Return the unsplittable modules in the model's order; modules that share tensors form one atom, at the first's position."""
    groups: list[tuple[list[str], dict[int, int]]] = []
    for leaf in _leaves(nodes):
        known = dict(leaf.tensors)
        mine: tuple[list[str], dict[int, int]] = ([], {})
        rest = []
        for group in groups:
            if group[1].keys() & known.keys():
                if not mine[0]:
                    rest.append(mine)
                mine[0].extend(group[0])
                mine[1].update(group[1])
            else:
                rest.append(group)
        if not mine[0]:
            rest.append(mine)
        mine[0].append(leaf.name)
        mine[1].update(known)
        groups = rest
    return [Atom(tuple(names), sum(sizes.values())) for names, sizes in groups]


def _leaves(nodes: Iterable[Node]) -> Iterable[Node]:
    for node in nodes:
        if node.parts:
            yield from _leaves(node.parts)
        else:
            yield node


def place(parts: Sequence[Atom], devices: Sequence[Device]) -> DevicePlacement:
    """Fill the devices one after another, in the model's order, so that data crosses each device boundary once.

    If modules are left for offload devices, the first computing device reserves memory to stream them.
    Raises: ConfigError with the missing bytes if the devices cannot hold the model.
    """
    reserve = 0
    filled = _fill(parts, devices, reserve)
    while True:
        spilled_sizes = [
            part.num_bytes
            for part, number in zip(parts, filled, strict=False)
            if devices[number].offload
        ]
        wanted = STREAMED_AT_ONCE * max(spilled_sizes, default=0)
        if wanted <= reserve:
            break
        reserve = wanted  # the reserve may spill a larger module, so repeat
        filled = _fill(parts, devices, reserve)
    if len(filled) < len(parts):
        raise ConfigError(_impossible(parts, devices, parts[len(filled) :]))
    places: dict[str, int | str] = {}
    used: dict[int | str, int] = {device.key: 0 for device in devices}
    for part, number in zip(parts, filled, strict=True):
        key = devices[number].key
        used[key] += part.num_bytes
        places.update(dict.fromkeys(part.names, key))
    return DevicePlacement(places, used, reserve)


def _fill(parts: Sequence[Atom], devices: Sequence[Device], reserve: int) -> list[int]:
    """Return the device index of each module, up to the first module that no device can hold."""
    filled: list[int] = []
    for number, device in enumerate(devices):
        free_bytes = device.limit
        if free_bytes is not None and not device.offload:
            free_bytes -= reserve
            reserve = 0  # on the first computing device only
        for part in parts[len(filled) :]:
            if free_bytes is not None:
                if part.num_bytes > max(free_bytes, 0):
                    break
                free_bytes -= part.num_bytes
            filled.append(number)
    return filled


def _impossible(
    parts: Sequence[Atom], devices: Sequence[Device], missing: Sequence[Atom]
) -> str:
    total = sum(part.num_bytes for part in parts)
    short = sum(part.num_bytes for part in missing)
    limits = ", ".join(
        f"{device.key}: {'any' if device.limit is None else readable(device.limit)}"
        for device in devices
    )
    largest = max(missing, key=lambda part: part.num_bytes)
    return (
        f"the model needs {readable(total)}, and with max_memory {{{limits}}} {readable(short)} of it do not fit ({len(missing)} "
        f"modules; the largest, {largest.names[0]}, takes {readable(largest.num_bytes)}). Nothing was "
        f"placed. Raise a limit by {readable(short)}, add 'disk', load in a smaller dtype, or allow "
        f"{largest.names[0]} to be split."
    )


def balanced(
    parts: Sequence[Atom], limits: Sequence[int], low_first: bool = False
) -> list[int]:
    """Return limits that spread the model evenly: the smallest common limit at which everything fits.

    With `low_first` the first device gets only the modules that the others cannot hold. The last device keeps its limit. If even
    the full limits do not hold the model, they are returned unchanged.
    """
    spread = limits[1:] if low_first else limits
    if len(spread) < 2 and not (low_first and len(limits) > 1):
        return list(limits)
    total = sum(part.num_bytes for part in parts)
    low, high = 0, total
    while low < high:
        middle = (low + high) // 2
        if _fits(parts, _capped(limits, middle, low_first)):
            high = middle
        else:
            low = middle + 1
    found = _capped(limits, low, low_first)
    if not _fits(parts, found):
        return list(limits)
    if low_first:
        return [_least_first(parts, found, limits[0]), *found[1:]]
    return [*found[:-1], limits[-1]]


def _capped(limits: Sequence[int], cap: int, low_first: bool) -> list[int]:
    if not low_first:
        return [min(limit, cap) for limit in limits]
    rest = [min(limit, cap) for limit in limits[1:]]
    return [limits[0] if cap >= max(limits[1:]) else 0, *rest]


def _least_first(parts: Sequence[Atom], found: Sequence[int], limit: int) -> int:
    """Return the smallest limit of the first device at which everything fits."""
    if _fits(parts, [0, *found[1:]]):
        return 0
    low, high = 0, limit
    while low < high:
        middle = (low + high) // 2
        if _fits(parts, [middle, *found[1:]]):
            high = middle
        else:
            low = middle + 1
    return low


def _fits(parts: Sequence[Atom], limits: Sequence[int]) -> bool:
    devices = [Device(number, limit) for number, limit in enumerate(limits)]
    return len(_fill(parts, devices, 0)) == len(parts)


def readable(num_bytes: int) -> str:
    """Return a number of bytes as readable text: "1.5 GB"."""
    size = float(num_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"
