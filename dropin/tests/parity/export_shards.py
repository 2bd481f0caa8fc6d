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
    file_names = []
    for safe in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            accelerator.save_model(
                model, folder, max_shard_size="2KB", safe_serialization=safe
            )
            file_names.append(sorted(path.name for path in Path(folder).iterdir()))
    return file_names


PROCESSES = (1,)
