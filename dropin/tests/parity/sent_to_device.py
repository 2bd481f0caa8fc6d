"""Batches moved to a device, with keys that stay."""

import torch

from accelerate.utils import send_to_device


def run() -> object:
    batch = {
        "x": torch.ones(2),
        "y": [torch.ones(1), "text"],
        "keep": torch.ones(1),
        3: torch.zeros(1),
    }
    moved = send_to_device(batch, "meta", skip_keys="keep")
    return [
        str(moved["x"].device),
        str(moved["y"][0].device),
        moved["y"][1],
        str(moved["keep"].device),
        str(moved[3].device),
    ]


PROCESSES = (1,)
