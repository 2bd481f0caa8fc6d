"""CPU affinity: pin each process to the cores near its device, as the kernel lists them in /sys. Does not import torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

SYS: Final = Path("/sys")


def parse_cpus(text: str) -> frozenset[int]:
    """Return the cores in the kernel's notation: `0-2,8` gives 0, 1, 2, 8.

    Raises: ValueError if the notation is malformed.
    """
    cpus: set[int] = set()
    for cpu_range in filter(None, text.strip().split(",")):
        first_cpu, _, last_cpu = cpu_range.partition("-")
        cpus.update(range(int(first_cpu), int(last_cpu or first_cpu) + 1))
    return frozenset(cpus)


def set_affinity(pci_address: str | None, root: Path = SYS) -> str:
    """Pin this process to the cores near the device at a PCI address such as 0000:3b:00.0; return what was done and why."""
    if pci_address is None or not hasattr(os, "sched_setaffinity"):
        return (
            "cores left as they are: the system does not tell which are near the device"
        )
    cpulist_path = root / "bus/pci/devices" / pci_address.lower() / "local_cpulist"
    allowed_cpus = os.sched_getaffinity(0)
    if cpulist_path.exists():
        near_cpus = parse_cpus(cpulist_path.read_text())
    else:
        near_cpus = frozenset()
    pinned_cpus = near_cpus & allowed_cpus
    if not pinned_cpus or pinned_cpus == allowed_cpus:
        return "cores left as they are: all or none of them are near the device"
    os.sched_setaffinity(0, pinned_cpus)
    return f"pinned to {len(pinned_cpus)} of {len(allowed_cpus)} cores, those near the device"
