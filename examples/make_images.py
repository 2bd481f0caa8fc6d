"""Draw small pictures of shapes into a folder, as files named `label_123.jpg`: data for images.py without a download.

python examples/make_images.py runs/shapes --num 60
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path

from PIL import Image, ImageDraw

SHAPES = {"circle": 0, "triangle": 3, "square": 4, "star": 10}  # label -> corners


def main() -> None:
    """Draw `num` pictures of every shape."""
    parser = argparse.ArgumentParser(
        description="Draw pictures of shapes, named label_123.jpg."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num", type=int, default=100, help="pictures of each shape")
    parser.add_argument(
        "--size", type=int, default=96, help="width and height in pixels"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(args.seed)
    for label in SHAPES:
        for number in range(args.num):
            draw_shape(label, args.size, chance).save(
                args.folder / f"{label}_{number}.jpg", quality=90
            )
    print(
        f"{args.num * len(SHAPES)} pictures of {', '.join(SHAPES)} are in {args.folder}"
    )


def draw_shape(label: str, size: int, chance: random.Random) -> Image.Image:
    """Return one shape of random position, size, rotation and color on a random background."""
    ground, ink = (tuple(chance.randrange(256) for _ in range(3)) for _ in range(2))
    picture = Image.new("RGB", (size, size), ground)
    radius = size * chance.uniform(0.2, 0.4)
    x, y = (size * chance.uniform(0.4, 0.6) for _ in range(2))
    pen = ImageDraw.Draw(picture)
    corners = SHAPES[label]
    if corners == 0:
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=ink)
        return picture
    turn = chance.uniform(0, 2 * math.pi)
    points = []
    for corner in range(corners):
        reach = radius * (0.45 if label == "star" and corner % 2 else 1.0)
        angle = turn + 2 * math.pi * corner / corners
        points.append((x + reach * math.cos(angle), y + reach * math.sin(angle)))
    pen.polygon(points, fill=ink)
    return picture


if __name__ == "__main__":
    main()
