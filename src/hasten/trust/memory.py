"""Memory of a rank by use: parameters, gradients, optimizer state, buffers, and the cache."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

from hasten import trees
from hasten.errors import DeviceError
from hasten.modules.names import local_tensor
from hasten.progress.meter import MemoryGauge
from hasten.runtime.devices import kind_of

_BAR: Final = 30


@dataclass(slots=True)
class MemoryReport:
    """Bytes on this rank, by use."""

    cause: str
    """The out-of-memory error, in one line."""
    held: dict[str, int]
    """Bytes by kind that persist from step to step."""
    process: dict[str, int]
    """Bytes of the whole process: in host memory, and on the device according to torch's allocator."""

    def shown(self) -> str:
        """Return the report as lines of text with bars."""
        process = ", ".join(f"{name} {words(size)}" for name, size in self.process.items())
        return "\n".join([f"  {self.cause}", *_bars(self.held), f"  process: {process}"])


def measure(
    cause: str, models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer], device: torch.device
) -> MemoryReport:
    """Return the memory use of this rank. Local; reads no tensor contents."""
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
    """Return the bytes of this process: resident in host memory, and in the device's allocator if there is one."""
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
    """Return a size as text: `1.5 GiB`."""
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


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of this rank's shards of the tensors, counting each storage once."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        part: Any = local_tensor(tensor)  # Any: sparse tensors have no storage themselves
        part = part._values() if part.is_sparse else part
        storages[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return sum(storages.values())


_WIDTH: Final = 960
_MARGIN: Final = 24
_LINE: Final = 22
_LABEL: Final = 260
_COLOURS: Final = MappingProxyType(
    {
        "parameters": "#1769aa",
        "gradients": "#2e8b57",
        "optimizer state": "#8d5fd3",
        "buffers": "#00838f",
        "other tensors": "#e08e0b",
        "rest of the process": "#e08e0b",
        "cache": "#b0a48a",
        "other processes": "#78909c",
        "free": "#eceff1",
    }
)


def parts_of(report: MemoryReport) -> dict[str, int]:
    """Return the memory by use, in drawing order; the bytes add up to the device, or to the process on a CPU."""
    held = dict(report.held)
    process = report.process
    if "device" not in process:
        return {**held, "rest of the process": max(process["resident"] - sum(held.values()), 0)}
    in_use, cache, free, total = (process[f"device{key}"] for key in (" in use", " cache", " free", ""))
    return {
        **held,
        "other tensors": max(in_use - sum(held.values()), 0),
        "cache": cache,
        "other processes": max(total - free - in_use - cache, 0),
        "free": free,
    }


def draw(report: MemoryReport, title: str) -> str:
    """Return the report as an SVG picture: a bar of all memory, and its parts with sizes."""
    parts = parts_of(report)
    rows = [(name, size, _COLOURS[name]) for name, size in parts.items()]
    body = [_text(_MARGIN, 34, title, 17), _text(_MARGIN, 56, report.cause, 12)]
    body += _stacked(rows, 74)
    y = 130
    body += _drawn_bars(rows, y)
    y += _LINE * len(rows) + 30
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{_WIDTH}" height="{y}" fill="white"/>', *body, "</svg>\n"])


def save(report: MemoryReport, folder: Path, rank: int) -> Path:
    """Write the picture and return its path. Raises: OSError when the folder cannot be written."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"memory-rank{rank}-{stamp}-{os.getpid()}.svg"
    path.write_text(draw(report, f"memory of rank {rank}"), "utf-8")
    return path


Row = tuple[str, int, str]


def _stacked(rows: Sequence[Row], y: int) -> Iterator[str]:
    """Yield one bar of all parts, each as wide as its share."""
    room, total = _WIDTH - 2 * _MARGIN, sum(size for _, size, _ in rows)
    x = float(_MARGIN)
    for name, size, colour in rows:
        width = room * size / total if total else 0.0
        yield f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="32" fill="{colour}"><title>{escape(name)}: {words(size)}</title></rect>'
        x += width


def _drawn_bars(rows: Sequence[Row], y: int) -> Iterator[str]:
    """Yield one line per row: its name, its size, and a bar relative to the largest."""
    most = max((size for _, size, _ in rows), default=0)
    room = _WIDTH - 2 * _MARGIN - _LABEL - 90
    for number, (name, size, colour) in enumerate(rows):
        at = y + number * _LINE
        width = room * size / most if most else 0.0
        yield _text(_MARGIN, at + 14, name, 12)
        yield f'<text x="{_MARGIN + _LABEL + 80}" y="{at + 14}" font-size="12" text-anchor="end">{words(size)}</text>'
        yield f'<rect x="{_MARGIN + _LABEL + 90}" y="{at + 3}" width="{width:.1f}" height="14" fill="{colour}"/>'


def _text(x: int, y: int, text: str, size: int) -> str:
    shown = text if len(text) <= 140 else text[:139] + "…"
    return f'<text x="{x}" y="{y}" font-size="{size}">{escape(shown)}</text>'


def snapshot(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    device: torch.device,
    folder: Path,
    rank: int,
) -> str:
    """Write the current memory use as a picture and as JSON next to it; return the path of the picture. Local.

    On a CUDA device the allocator's blocks are written too, with stacks if `torch.cuda.memory._record_memory_history()` was called.
    """
    if kind_of(device).lazy:
        raise DeviceError(
            f"memory_snapshot() does not support {device}: torch has no information about memory on lazy devices. Use the device's "
            "profiler (torch_xla.debug.profiler)."
        )
    report = measure("on request", models, optimizers, device)
    picture = save(report, folder, rank)
    picture.with_suffix(".json").write_text(json.dumps(_as_json(report), indent=2), "utf-8")
    if device.type == "cuda":
        blocks = str(picture.with_suffix(".pickle"))
        torch.cuda.memory._dump_snapshot(blocks)  # type: ignore[no-untyped-call]  # torch has no public name for it
    return str(picture)


def _as_json(report: MemoryReport) -> dict[str, object]:
    return {
        "cause": report.cause,
        "parts": parts_of(report),
        "process": report.process,
    }
