"""Memory of a rank by use: parameters, gradients, optimizer state, buffers, and the cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from hasten import trees
from hasten.modules.names import local_tensor
from hasten.progress.meter import MemoryGauge

_BAR_WIDTH: Final = 30


def memory_report(
    models: Iterable[nn.Module],
    # Any: of prepared optimizers as well, and of transformers'
    optimizers: Iterable[Any],
    device: torch.device,
) -> str:
    """Return the memory use of this rank as lines of text with bars. Local; reads no tensor contents."""
    process = ", ".join(
        f"{name} {format_size(size)}" for name, size in process_memory(device).items()
    )
    bars = _draw_bars(model_memory(models, optimizers))
    return "\n".join(["  memory of this rank:", *bars, f"  process: {process}"])


# Any: as above
def model_memory(
    models: Iterable[nn.Module], optimizers: Iterable[Any]
) -> dict[str, int]:
    """Return the bytes on this rank that persist from step to step, by use."""
    parameters: list[Tensor] = []
    buffers: list[Tensor] = []
    for model in models:
        parameters += model.parameters()
        buffers += model.buffers()
    parameters = list(dict.fromkeys(parameters))
    gradients = [parameter.grad for parameter in parameters]
    state_tensors: list[Tensor] = []
    for optimizer in optimizers:
        state_tensors += trees.tensors(dict(optimizer.state))
    return {
        "parameters": _count_bytes(parameters),
        "gradients": _count_bytes(grad for grad in gradients if grad is not None),
        "optimizer state": _count_bytes(state_tensors),
        "buffers": _count_bytes(buffers),
    }


def process_memory(device: torch.device) -> dict[str, int]:
    """Return the bytes of this process: resident in host memory, and in the device's allocator if there is one."""
    memory = {"resident": MemoryGauge(torch.device("cpu")).used_bytes() or 0}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        reserved = torch.cuda.memory_reserved(device)
        memory |= {
            "device in use": allocated,
            "device cache": reserved - allocated,
            "device free": free,
            "device": total,
        }
    return memory


def format_size(size: int) -> str:
    """Return a size as text: `1.5 GiB`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def _draw_bars(sizes: Mapping[str, int]) -> list[str]:
    largest_bytes = max(sizes.values(), default=0)
    width = max(map(len, sizes), default=0)
    bars = []
    for name, size in sizes.items():
        bars.append(
            f"    {name:<{width}}  {format_size(size):>10}  {'█' * round(_BAR_WIDTH * size / largest_bytes) if largest_bytes else ''}".rstrip()
        )
    return bars


def _count_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of this rank's shards of the tensors, counting each storage once."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        # Any: sparse tensors have no storage themselves
        section: Any = local_tensor(tensor)
        section = section._values() if section.is_sparse else section
        storages[section.untyped_storage().data_ptr()] = (
            section.untyped_storage().nbytes()
        )
    return sum(storages.values())
