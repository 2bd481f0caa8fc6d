"""accelerator.save writes on the main process only."""

import tempfile
from pathlib import Path

import torch

from accelerate import Accelerator
from accelerate.utils import load


def run() -> object:
    accelerator = Accelerator(cpu=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.pt"
        accelerator.save({"a": torch.ones(2)}, file)
        return [
            file.exists() == accelerator.is_main_process,
            load(file)["a"].tolist() if file.exists() else None,
        ]


PROCESSES = (1, 2)
