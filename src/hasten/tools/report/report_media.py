"""Logged images and tables of runs as parts of the report's page."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

import numpy as np

from hasten.tracking.run_folder import LoggedImage, RunFolder

MOST_STEPS: Final = 8
MOST_PER_STEP: Final = 8
MOST_BYTES: Final = 24_000_000
MOST_ROWS: Final = 200
_PNG: Final = b"\x89PNG\r\n\x1a\n"


def images(runs: Sequence[RunFolder]) -> list[str]:
    """Return one part per name and run: its images at up to 8 steps, the first and the last among them."""
    found, room = [], MOST_BYTES
    for run in runs:
        for name, logged in run.images.items():
            title = f"{name}: {run.name}" if len(runs) > 1 else name
            figures: list[str] = []
            for image in _chosen(logged):
                content = _content(image.path, run.folder, room)
                if content is None:
                    continue
                room -= len(content)
                address = f"data:image/png;base64,{base64.b64encode(content).decode()}"
                caption = f"step {image.step}" + (f", {image.number}" if image.number else "")
                figures.append(
                    f'<figure><img src="{address}" alt="{escape(title)}"><figcaption>{caption}</figcaption></figure>'
                )
            left_out = f"{len(figures)} of {len(logged)} images" if len(figures) < len(logged) else ""
            heading = f"<h2>{escape(title)}{f' ({left_out})' if left_out else ''}</h2>"
            found.append(f'{heading}<div class="images">{"".join(figures)}</div>')
    return found


def _chosen(logged: Sequence[LoggedImage]) -> list[LoggedImage]:
    """The images of the first, the last and evenly spaced steps between them."""
    steps = sorted({image.step for image in logged})
    spread = np.linspace(0, len(steps) - 1, min(MOST_STEPS, len(steps))).round().astype(int).tolist()
    kept = {steps[at] for at in spread}
    return [image for image in logged if image.step in kept and image.number < MOST_PER_STEP]


def _content(path: Path, folder: Path, room: int) -> bytes | None:
    """The PNG, or None if it is missing, no PNG, larger than the room that is left, or outside the run's folder."""
    whole = path.resolve()
    if not whole.is_relative_to(folder.resolve()) or not whole.is_file() or whole.stat().st_size > room:
        return None
    content = whole.read_bytes()
    return content if content.startswith(_PNG) else None


def tables(runs: Sequence[RunFolder]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return title, heading and rows of the newest table of each name and run."""
    return [
        (
            f"{name}{f': {run.name}' if len(runs) > 1 else ''} (step {table.step})",
            list(table.columns),
            [[str(cell) for cell in row] for row in table.rows[:MOST_ROWS]],
        )
        for run in runs
        for name, table in run.tables.items()
    ]
