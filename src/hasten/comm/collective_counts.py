"""How many collectives each process group of this process has begun, torch's own included."""

from __future__ import annotations

import torch
from torch.distributed import distributed_c10d as c10d


def begun_collectives(device_type: str) -> dict[str, int]:
    """The number of collectives so far by group and device type, as `name/cpu`; every group counts from its creation."""
    found: dict[str, int] = {}
    for group, name in dict(c10d._world.pg_names).items():
        for kind in {"cpu", device_type}:
            try:
                backend = group._get_backend(torch.device(kind))
                count = backend._get_sequence_number_for_group()  # type: ignore[attr-defined]  # not in the stub
            except RuntimeError:  # the group has no backend for this device, or was destroyed meanwhile
                continue
            found[f"{name}/{kind}"] = count
    return found
