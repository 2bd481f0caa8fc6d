"""What holds the memory of a rank: parameters, gradients, optimizer state, buffers, activations by module, the cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from hasten import trees
from hasten.modules.dtensors import is_dtensor
from hasten.progress.memory import MemoryGauge

_BAR: Final = 30
_SHOWN_MODULES: Final = 8
_HEAD: Final = "outside of modules"


@dataclass(slots=True)
class MemoryReport:
    """Bytes on this rank, by what they are for."""

    cause: str
    """The error that said memory ran out, in a line."""
    held: dict[str, int]
    """Bytes by kind: what lives from step to step."""
    process: dict[str, int]
    """Bytes of the whole process: in host memory, and on the device as torch's allocator counts them."""
    by_module: dict[str, int] = field(default_factory=dict)
    """Bytes that the forward of one sample keeps for its backward, by module; filled by `activations`."""

    @contextmanager
    def activations(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """A block for a forward whose saved tensors are counted; an error leaves what was counted until then."""
        counter = _Activations(self.by_module)
        with ExitStack() as hooks:
            for model in models:
                for name, module in model.named_modules():
                    before = module.register_forward_pre_hook(partial(counter.enter, name or type(module).__name__))
                    hooks.callback(before.remove)
                    hooks.callback(module.register_forward_hook(counter.leave, always_call=True).remove)
            with torch.autograd.graph.saved_tensors_hooks(counter.pack, _same):
                yield

    def summary(self) -> str:
        """The report in one line."""
        sizes = dict(self.held)
        if self.by_module:
            sizes["activations of one sample"] = sum(self.by_module.values())
        return (
            f"{self.cause} ({', '.join(f'{name} {words(size)}' for name, size in {**sizes, **self.process}.items())})"
        )

    def shown(self) -> str:
        """The report as lines of text with bars."""
        largest = sorted(self.by_module.items(), key=lambda item: -item[1])
        if len(largest) > _SHOWN_MODULES:
            rest = sum(size for _, size in largest[_SHOWN_MODULES:])
            largest = [*largest[:_SHOWN_MODULES], (f"{len(self.by_module) - _SHOWN_MODULES} others", rest)]
        lines = [f"  {self.cause}", *_bars(self.held)]
        if largest:
            lines += ["  activations of one sample, by module:", *_bars(dict(largest))]
        return "\n".join(
            [*lines, f"  process: {', '.join(f'{name} {words(size)}' for name, size in self.process.items())}"]
        )


def measure(
    cause: str, models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer], device: torch.device
) -> MemoryReport:
    """What holds the memory of this rank now. Local; reads no tensor's content."""
    parameters = list(dict.fromkeys(p for model in models for p in model.parameters()))
    buffers = [buffer for model in models for buffer in model.buffers()]
    states = [tensor for optimizer in optimizers for tensor in trees.tensors(dict(optimizer.state))]
    held = {
        "parameters": _bytes(parameters),
        "gradients": _bytes(p.grad for p in parameters if p.grad is not None),
        "optimizer state": _bytes(states),
        "buffers": _bytes(buffers),
    }
    return MemoryReport(cause, held, process_memory(device))


def process_memory(device: torch.device) -> dict[str, int]:
    """Bytes of this process: resident in host memory, and of the device's allocator where there is one."""
    found = {"resident": MemoryGauge(torch.device("cpu")).used_bytes() or 0}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        found |= {
            "device in use": allocated,
            "device cache": reserved - allocated,
            "device free": free,
            "device": total,
        }
    return found


def words(size: int) -> str:
    """`1.5 GiB`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def _bars(sizes: Mapping[str, int]) -> list[str]:
    most, width = max(sizes.values(), default=0), max((len(name) for name in sizes), default=0)
    return [
        f"    {name:<{width}}  {words(size):>10}  {'█' * round(_BAR * size / most) if most else ''}".rstrip()
        for name, size in sizes.items()
    ]


class _Activations:
    """Counts the storages that autograd saves, once each, for the innermost module that is running."""

    def __init__(self, found: dict[str, int]) -> None:
        self._found = found
        self._inside: list[str] = []
        self._seen: set[int] = set()

    def enter(self, name: str, module: nn.Module, inputs: object) -> None:
        self._inside.append(name)
        for parameter in module.parameters(recurse=False):  # FSDP2 gathers them when the module is called
            self._seen.add(_local(parameter).untyped_storage().data_ptr())

    def leave(self, module: nn.Module, inputs: object, output: object) -> None:
        if self._inside:
            self._inside.pop()

    def pack(self, tensor: Tensor) -> Tensor:
        storage = _local(tensor).untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            name = self._inside[-1] if self._inside else _HEAD
            self._found[name] = self._found.get(name, 0) + storage.nbytes()
        return tensor


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of this rank's parts of the tensors, storages counted once."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        part: Any = _local(tensor)  # Any: sparse tensors have no storage of their own
        part = part._values() if part.is_sparse else part
        storages[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return sum(storages.values())


def _local(tensor: Any) -> Any:  # Any: a tensor, or the DTensor it is a part of
    return tensor.to_local() if is_dtensor(tensor) else tensor
