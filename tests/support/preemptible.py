"""Training that saves and stops after a signal, continues from its newest checkpoint, and writes down every step; a script for launchers."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from hasten import PREEMPTED_EXIT_CODE, Accelerator


def train(
    accelerator: Accelerator, samples: int = 240, pause_s: float = 0.0, save_at: int = 0
) -> None:
    """Train one epoch on numbered samples, with a save after step `save_at`; `seen-<rank>` gets a line for each step, and the weights."""
    torch.manual_seed(4)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
    )
    data = DataLoader(
        TensorDataset(torch.arange(float(samples)).reshape(-1, 1)),
        batch_size=2,
        shuffle=True,
    )
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, data)
    folder = Path(str(accelerator.config.project.project_dir))
    if (folder / "checkpoints").exists():
        accelerator.load_state()
    with (folder / f"seen-{accelerator.process_index}").open("a") as log_file:
        for (x,) in loader:
            loss = model(2 * x / samples).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step, size = optimizer.num_updates, accelerator.num_processes
            print(
                step,
                size,
                *(int(number) for number in x.flatten().tolist()),
                loss.item(),
                file=log_file,
                flush=True,
            )
            time.sleep(pause_s)
            if step == save_at:
                accelerator.save_state()
            if accelerator.preempted:
                accelerator.save_state()
                sys.exit(PREEMPTED_EXIT_CODE)
        weights = [
            p.flatten().tolist() for p in accelerator.unwrap_model(model).parameters()
        ]
        print("end", weights, file=log_file, flush=True)


if __name__ == "__main__":
    name = f"pid-{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    Path("run", name).write_text(f"{os.getpid()}\n")
    # no settings but the folder: the others are those of the launcher
    train(
        Accelerator(project_dir="run"),
        int(sys.argv[1]),
        float(sys.argv[2]),
        int(sys.argv[3]),
    )
