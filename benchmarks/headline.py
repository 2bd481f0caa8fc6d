"""Draws the README's picture from committed results: hasten beside the peers, five things people wait for.

python benchmarks/headline.py     # writes docs/pictures/headline.png
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt
from PIL import Image
from recording import newest_measurements

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "headline.png"

COLOURS = {
    "hasten": "#2f6f4f",
    "bare torch": "#9aa5b1",
    "Accelerate": "#d98c3f",
    "Fabric": "#7a6fb0",
}
Panel = tuple[str, str, dict[str, float]]


def list_panels() -> list[Panel]:
    """Title, unit and a number for each contender; every number stands in a file of benchmarks/results."""
    offload = {
        (row["part"], row["what"]): row
        for row in newest_measurements("offload", "cuda")["rows"]
    }
    forward = {
        contender: offload[("cpu forward", contender)]["seconds"]
        for contender in ("hasten", "Accelerate")
    }
    loads = newest_measurements("cold_loading", "cuda")
    bound = newest_measurements("full_loop", "cuda")["input_bound"]
    return [
        (
            f"forward of a {offload[('cpu forward', 'hasten')]['GB']:.0f} GB model\nfrom host memory",
            "s",
            forward,
        ),
        (
            f"load {loads['gigabytes']:.1f} GB to the GPU\nfrom the page cache",
            "s",
            {
                contender: loads["medians"][contender]["warm_s"]
                for contender in ("hasten", "Accelerate")
            },
        ),
        (
            "step with 154 MB batches",
            "ms",
            {
                contender: bound[f"{contender} (ms)"]
                for contender in ("hasten", "bare torch", "Accelerate", "Fabric")
            },
        ),
        (
            "save 9.3 GB of training state,\nsynced to disk",
            "s",
            checkpoint_numbers("save_s"),
        ),
        ("load it again", "s", checkpoint_numbers("load_s")),
    ]


def checkpoint_numbers(key: str) -> dict[str, float]:
    """One number of the checkpoint benchmark for each contender; all of them sync."""
    rows = {
        row["way"]: row[key]
        for row in newest_measurements("checkpoint", "cuda")["ways"]
    }
    return {
        "hasten": rows["hasten"],
        "bare torch": rows["torch synced"],
        "Accelerate": rows["accelerate synced"],
    }


def drawn_in(picture: Path) -> list[Panel]:
    """The panels that a picture shows; they are kept in the file."""
    with Image.open(picture) as image:
        return [
            (title, unit, numbers)
            for title, unit, numbers in json.loads(image.info["Description"])
        ]


def main() -> None:
    """Draw the picture."""
    drawn = list_panels()
    figure, axes = plt.subplots(1, len(drawn), figsize=(13, 2.9))
    for axis, (title, unit, numbers) in zip(axes, drawn, strict=True):
        bars = axis.bar(
            range(len(numbers)),
            list(numbers.values()),
            color=[COLOURS[name] for name in numbers],
        )
        axis.bar_label(
            bars, [f"{value:.2f}" for value in numbers.values()], fontsize=9, padding=2
        )
        axis.set_xticks(
            range(len(numbers)),
            [name.replace(" ", "\n") for name in numbers],
            fontsize=8,
        )
        axis.set_title(f"{title} ({unit})", fontsize=9)
        axis.set_yticks([])
        axis.margins(y=0.18)
        axis.spines[["top", "right", "left"]].set_visible(False)
    figure.tight_layout()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110, metadata={"Description": json.dumps(drawn)})


if __name__ == "__main__":
    main()
