"""Draws the README's picture from committed results: hasten beside the peers, five things people wait for.

python benchmarks/headline.py     # writes docs/pictures/headline.png
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from recording import newest

COLOURS = {"hasten": "#2f6f4f", "bare torch": "#9aa5b1", "Accelerate": "#d98c3f", "Fabric": "#7a6fb0"}
Panel = tuple[str, str, dict[str, float]]


def panels() -> list[Panel]:
    """Title, unit and a number for each contender; every number stands in a file of benchmarks/results."""
    offload = {(row["part"], row["what"]): row for row in newest("offload", "cuda")["rows"]}
    forward = {who: offload[("cpu forward", who)]["seconds"] for who in ("hasten", "Accelerate")}
    load = offload[("loading", "6.9 GB of safetensors to the device")]
    bound = newest("full_loop", "cuda")["input_bound"]
    return [
        ("forward of a 20 GB model\nfrom host memory", "s", forward),
        ("load 6.9 GB to the GPU", "s", {"hasten": load["hasten_s"], "Accelerate": load["Accelerate_s"]}),
        (
            "step with 154 MB batches",
            "ms",
            {who: bound[f"{who} (ms)"] for who in ("hasten", "bare torch", "Accelerate", "Fabric")},
        ),
        ("save 9.3 GB of training state,\nsynced to disk", "s", ways("save_s", " synced")),
        ("load it again", "s", ways("load_s")),
    ]


def ways(key: str, suffix: str = "") -> dict[str, float]:
    """One number of the checkpoint benchmark for each contender; hasten always syncs."""
    rows = {row["way"]: row[key] for row in newest("checkpoint", "cuda")["ways"]}
    return {
        "hasten": rows["hasten"],
        "bare torch": rows["torch" + suffix],
        "Accelerate": rows["accelerate" + suffix],
    }


def main() -> None:
    """Draw the picture."""
    drawn = panels()
    figure, axes = plt.subplots(1, len(drawn), figsize=(13, 2.9))
    for axis, (title, unit, numbers) in zip(axes, drawn, strict=True):
        bars = axis.bar(range(len(numbers)), list(numbers.values()), color=[COLOURS[name] for name in numbers])
        axis.bar_label(bars, [f"{value:.2f}" for value in numbers.values()], fontsize=9, padding=2)
        axis.set_xticks(range(len(numbers)), [name.replace(" ", "\n") for name in numbers], fontsize=8)
        axis.set_title(f"{title} ({unit})", fontsize=9)
        axis.set_yticks([])
        axis.margins(y=0.18)
        axis.spines[["top", "right", "left"]].set_visible(False)
    figure.tight_layout()
    target = Path(__file__).parents[1] / "docs" / "pictures" / "headline.png"
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
