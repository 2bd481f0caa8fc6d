"""The memory report as a picture: one SVG file that any browser opens, drawn without further packages."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch
from torch import nn

from hasten.errors import DeviceError
from hasten.runtime.devices import kind_of
from hasten.trust.memory.memory import MemoryReport, measure, words

_WIDTH: Final = 960
_MARGIN: Final = 24
_LINE: Final = 22
_LABEL: Final = 260
_MODULES: Final = 24
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
_MODULE_COLOUR: Final = "#d1495b"


def parts_of(report: MemoryReport) -> dict[str, int]:
    """What the memory consists of, in the order in which it is drawn; the bytes add up to the device, or to the process on a CPU.

    Activations of one sample are gone when the report is made: what they took is part of the cache or free, and is drawn by module.
    """
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
    """The picture as SVG text: one bar of all the memory, its parts with their sizes, and the activations by module."""
    parts = parts_of(report)
    modules = sorted(report.by_module.items(), key=lambda item: -item[1])
    rows = [(name, size, _COLOURS[name]) for name, size in parts.items()]
    body = [_text(_MARGIN, 34, title, 17), _text(_MARGIN, 56, report.cause, 12)]
    body += _stacked(rows, 74)
    y = 130
    body += _bars(rows, y)
    y += _LINE * len(rows) + 30
    if modules:
        total = sum(report.by_module.values())
        body.append(_text(_MARGIN, y, f"activations of one sample, by module: {words(total)}", 14))
        shown = [(name, size, _MODULE_COLOUR) for name, size in modules[:_MODULES]]
        if rest := modules[_MODULES:]:
            shown.append((f"{len(rest)} others", sum(size for _, size in rest), _MODULE_COLOUR))
        body += _bars(shown, y + 14)
        y += _LINE * len(shown) + 34
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{_WIDTH}" height="{y}" fill="white"/>', *body, "</svg>\n"])


def save(report: MemoryReport, folder: Path, rank: int) -> Path:
    """Write the picture; where it lies. Raises: OSError when the folder cannot be written."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"memory-rank{rank}-{stamp}-{os.getpid()}.svg"
    path.write_text(draw(report, f"memory of rank {rank}"), "utf-8")
    return path


Row = tuple[str, int, str]


def _stacked(rows: Sequence[Row], y: int) -> Iterator[str]:
    """All parts in one bar, as wide as their share."""
    room, total = _WIDTH - 2 * _MARGIN, sum(size for _, size, _ in rows)
    x = float(_MARGIN)
    for name, size, colour in rows:
        width = room * size / total if total else 0.0
        yield f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="32" fill="{colour}"><title>{escape(name)}: {words(size)}</title></rect>'
        x += width


def _bars(rows: Sequence[Row], y: int) -> Iterator[str]:
    """One line for each: its name, its size, and a bar as long as its share of the largest."""
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
    """Write what holds the memory now as a picture and as JSON beside it; where the picture lies. Local.

    On a CUDA device the allocator's blocks go beside them, with stacks if `torch.cuda.memory._record_memory_history()` was called.
    """
    if kind_of(device).lazy:
        raise DeviceError(
            f"memory_snapshot() cannot look into {device}: operations run there as whole programs, and tensors have no memory that torch "
            "can see. Use the device's own profiler (torch_xla.debug.profiler)."
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
        "activations_by_module": report.by_module,
    }
