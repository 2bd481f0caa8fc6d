"""Draws mesh.svg: eight processes on two machines as a mesh of shards, parts of a sequence and parts of layers.

python docs/pictures/mesh.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hasten.runtime.mesh_plan import Axis, MeshSpec

SPEC: Final = MeshSpec(dp_shard=2, cp=2, tp=2)
PER_MACHINE: Final = 4
CELL: Final = 92
LEFT: Final = 120
TOP: Final = 74
COLORS: Final = ("#dbe9f6", "#fde5cd")


def text(x: float, y: float, words: str, size: int = 13, weight: str = "normal") -> str:
    """Return one centred line of text."""
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="middle"'
    return f'<text x="{x}" y="{y}" {style}>{words}</text>'


def drawn(spec: MeshSpec) -> str:
    """Return the picture: a column per part of the data and of the sequence, a row per part of the layers."""
    columns, rows = spec.size(Axis.DP_SHARD, Axis.CP), spec.size(Axis.TP)
    width, height = LEFT + columns * CELL + 20, TOP + rows * CELL + 66
    parts = [f'<rect width="{width}" height="{height}" fill="white"/>']
    for shard in range(spec.dp_shard):
        middle = LEFT + (shard + 0.5) * spec.cp * CELL
        parts.append(text(middle, 22, f"machine {shard}: dp_shard {shard}", 14, "bold"))
        parts.append(text(middle, 42, "its own samples"))
    for rank in range(spec.world_size):
        where = spec.coordinate(rank)
        column = where[Axis.DP_SHARD] * spec.cp + where[Axis.CP]
        x, y = LEFT + column * CELL, TOP + where[Axis.TP] * CELL
        color = COLORS[rank // PER_MACHINE % len(COLORS)]
        box = f'x="{x + 4}" y="{y + 4}" width="{CELL - 8}" height="{CELL - 8}" rx="8"'
        parts.append(f'<rect {box} fill="{color}" stroke="#555"/>')
        parts.append(text(x + CELL / 2, y + 42, f"rank {rank}", 15, "bold"))
        parts.append(
            text(x + CELL / 2, y + 62, f"cp {where[Axis.CP]}, tp {where[Axis.TP]}", 12)
        )
        if where[Axis.TP] == 0:
            parts.append(text(x + CELL / 2, TOP - 6, f"tokens {where[Axis.CP]}", 12))
    for row in range(rows):
        parts.append(text(LEFT / 2, TOP + (row + 0.5) * CELL, f"tp {row}", 14, "bold"))
        parts.append(
            text(LEFT / 2, TOP + (row + 0.5) * CELL + 18, "part of layers", 12)
        )
    foot = TOP + rows * CELL
    parts.append(
        text(
            width / 2,
            foot + 26,
            "down: layers split (tp) · across: sequences split (cp), then samples (dp)",
        )
    )
    parts.append(
        text(width / 2, foot + 46, "parameters are sharded over all columns of a row")
    )
    body = "\n".join(parts)
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" fill="#222">\n{body}\n</svg>\n'


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(drawn(SPEC), "utf-8")
