"""How many bytes of weights each device may hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from hasten.checkpoint.export import parse_size
from hasten.errors import ConfigError

DeviceKey = int | str
_HOST_SHARE = 0.9  # of the memory that is free now; the rest is for everything else on the machine
_DEVICE_SHARE = 0.9


def get_max_memory(max_memory: Mapping[DeviceKey, float | str] | None = None) -> dict[DeviceKey, int]:
    """Bytes per device, computing devices first, then "cpu" and "disk".

    Without an argument, what is free now on every accelerator and on the host. Sizes may be written "10GB" or "2GiB".
    Raises: ConfigError for a device that is not there or a size that is none.
    """
    if max_memory is None:
        found: dict[DeviceKey, int] = {index: int(_DEVICE_SHARE * _free(index)) for index in range(_num_devices())}
        found["cpu"] = int(_HOST_SHARE * free_host_bytes())
        return found
    limits = {_key(key): parse_size(size) for key, size in max_memory.items()}
    known = {*range(_num_devices()), "cpu", "disk", "mps"}
    for key in limits:
        if key not in known:
            devices = ", ".join(str(index) for index in range(_num_devices())) or "no accelerator"
            raise ConfigError(
                f"max_memory names device {key!r}, which this machine does not have ({devices}, 'cpu', 'disk'). "
                "Name devices by their index, or leave it out."
            )
    return dict(sorted(limits.items(), key=lambda item: _rank(item[0])))


def _key(key: DeviceKey) -> DeviceKey:
    if isinstance(key, str) and key.isdigit():
        return int(key)
    if isinstance(key, str) and ":" in key:
        return torch.device(key).index
    return key


def _rank(key: DeviceKey) -> tuple[int, int]:
    return (0, key) if isinstance(key, int) else (("mps", "cpu", "disk").index(key) + 1, 0)


def _num_devices() -> int:
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _free(index: int) -> int:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None, "there is an accelerator"
    module = torch.get_device_module(kind)
    if hasattr(module, "mem_get_info"):
        return int(module.mem_get_info(index)[0])
    return free_host_bytes()  # devices that share the host's memory


def free_host_bytes() -> int:
    """Host memory that can be taken without swapping, as the kernel estimates it, and the container allows."""
    free = 8 * 1024**3
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        lines = dict(line.split(":", 1) for line in meminfo.read_text("utf-8").splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text("utf-8").strip()).isdigit():
        free = min(free, max(int(text) - int(used.read_text("utf-8")), 0))
    return free
