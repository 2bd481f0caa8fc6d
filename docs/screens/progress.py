"""Draw the progress display of this folder: the real bar, nested, with a straggler hint, saved as SVG and text.

Run `python docs/screens/progress.py` from the root of the repository.
"""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console, Group

from hasten.progress.display import rendered
from hasten.progress.meter import Reading
from hasten.progress.straggler import Straggler
from hasten.progress.text import line


def main() -> None:
    """Write progress.svg and progress.txt."""
    readings = (
        Reading(desc="epochs", step=1, total=3, elapsed_s=70, eta_s=118, steps_per_s=1 / 59),
        Reading(
            desc="epoch 2",
            step=120,
            total=1000,
            elapsed_s=23,
            eta_s=169,
            samples_per_s=5210,
            tokens_per_s=1.22e6,
            memory_bytes=12_300_000_000,
            memory_total_bytes=150_000_000_000,
            values={"loss": 0.53214, "lr": 8.8e-5},
            hint=str(Straggler(rank=3, seconds=0.052, usual_s=0.029)),
        ),
    )
    folder = Path(__file__).parent
    console = Console(record=True, width=132, force_terminal=True, file=io.StringIO())
    console.print(Group(*(rendered(reading) for reading in readings)))
    console.save_svg(str(folder / "progress.svg"), title="accelerator.progress(loader)")
    (folder / "progress.txt").write_text("".join(f"{line(reading)}\n" for reading in readings), encoding="utf-8")


if __name__ == "__main__":
    main()
