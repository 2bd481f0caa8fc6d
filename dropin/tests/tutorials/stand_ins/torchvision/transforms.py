"""Picture transforms under the names that a tutorial uses, drawing their random numbers from torch."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL.Image import Image

# Any in this file: what goes from one transform to the next, a picture first and a tensor last.


class Compose:
    """One transform after the other."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class Resize:
    """To a size of (height, width)."""

    def __init__(self, size: tuple[int, int]) -> None:
        self.size = size

    def __call__(self, image: Image) -> Image:
        return image.resize(self.size[::-1])


class RandomResizedCrop(Resize):
    """A random part of the picture, to a size."""

    def __init__(self, size: tuple[int, int], scale: tuple[float, float]) -> None:
        super().__init__(size)
        self.scale = scale

    def __call__(self, image: Image) -> Image:
        share, left, top = torch.rand(3).tolist()
        side = (self.scale[0] + share * (self.scale[1] - self.scale[0])) ** 0.5
        width, height = (int(side * length) for length in image.size)
        x, y = int(left * (image.width - width)), int(top * (image.height - height))
        return super().__call__(image.crop((x, y, x + width, y + height)))


class ToTensor:
    """Channels first, between 0 and 1."""

    def __call__(self, image: Image) -> torch.Tensor:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
