"""Exported weights in files of a limited size."""

import tempfile
from pathlib import Path

import torch
from torch import nn

from accelerate import Accelerator


def run() -> object:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))))
    found = []
    for safe in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            accelerator.save_model(
                model, folder, max_shard_size="2KB", safe_serialization=safe
            )
            found.append(sorted(one.name for one in Path(folder).iterdir()))
    return found


PROCESSES = (1,)
