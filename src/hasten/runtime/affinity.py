"""CPU affinity: pin each process to the cores near its device, as described in /sys. Does not import torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hasten.errors import ConfigError

SYS: Final = Path("/sys")


@dataclass(frozen=True, slots=True)
class AffinityPlan:
    """The cores to pin to, or None to leave the affinity unchanged; `reason` explains either choice."""

    cpus: frozenset[int] | None
    reason: str


def parse_cpus(text: str) -> frozenset[int]:
    """Return the cores in the kernel's notation: `0-2,8` gives 0, 1, 2, 8.

    Raises: ValueError if the notation is malformed.
    """
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def numa_nodes(root: Path = SYS) -> dict[int, frozenset[int]]:
    """Return the cores of each NUMA node that has cores; empty if the system does not report NUMA nodes."""
    found: dict[int, frozenset[int]] = {}
    for folder in sorted((root / "devices/system/node").glob("node[0-9]*")):
        cpus = parse_cpus((folder / "cpulist").read_text())
        if cpus:  # memory-only nodes have no cores
            found[int(folder.name.removeprefix("node"))] = cpus
    return found


def node_of_device(pci_address: str, root: Path = SYS) -> int | None:
    """Return the NUMA node of the device at a PCI address such as 0000:3b:00.0; None if it is unknown."""
    path = root / "bus/pci/devices" / pci_address.lower() / "numa_node"
    number = int(path.read_text()) if path.exists() else -1
    return number if number >= 0 else None


def plan(
    local_rank: int,
    local_world_size: int,
    *,
    nodes: Mapping[int, Set[int]],
    allowed: Set[int],
    device_node: int | None = None,
) -> AffinityPlan:
    """Return the cores for one process of this machine: those of its device's NUMA node, else of its share of nodes.

    Raises: ConfigError for a device on a node that does not exist.
    """
    usable = {
        number: frozenset(cpus & allowed)
        for number, cpus in sorted(nodes.items())
        if cpus & allowed
    }
    if device_node is not None and device_node not in nodes:
        raise ConfigError(
            f"the device is on NUMA node {device_node}, but this machine has {sorted(nodes)}."
        )
    if len(usable) < 2:
        why = (
            "the system does not tell its NUMA nodes"
            if not nodes
            else "all usable cores are on one NUMA node"
        )
        return AffinityPlan(None, f"cores left as they are: {why}")
    if device_node is not None:
        if device_node not in usable:
            return AffinityPlan(
                None,
                f"cores left as they are: none of the allowed ones is on NUMA node {device_node} of the device",
            )
        return AffinityPlan(
            usable[device_node],
            f"the cores of NUMA node {device_node}, where the device is",
        )
    if local_world_size == 1:
        return AffinityPlan(
            None,
            "cores left as they are: a single process without a device may use them all",
        )
    number = list(usable)[local_rank * len(usable) // local_world_size]
    return AffinityPlan(
        usable[number],
        f"the cores of NUMA node {number}, the share of local rank {local_rank} of {local_world_size}",
    )


def set_affinity(
    local_rank: int, local_world_size: int, pci_address: str | None = None
) -> AffinityPlan:
    """Pin this process to the cores near its device; return the plan, with the cores and the reason.

    `pci_address` is that of the process's device, if it has one.
    """
    if not hasattr(os, "sched_setaffinity"):
        return AffinityPlan(
            None, "cores left as they are: this system has no call to choose them"
        )
    chosen = plan(
        local_rank,
        local_world_size,
        nodes=numa_nodes(),
        allowed=os.sched_getaffinity(0),
        device_node=node_of_device(pci_address) if pci_address else None,
    )
    if chosen.cpus is not None:
        os.sched_setaffinity(0, chosen.cpus)
    return chosen
