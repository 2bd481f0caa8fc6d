"""The training of the SLURM tests: saves and exits with code 85 when it is told to stop, and goes on from the newest checkpoint."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from hasten import PREEMPTED_EXIT_CODE, Accelerator


def train(accelerator: Accelerator, pause: float = 0.0) -> None:
    """Train one epoch; every rank writes down its batches, losses and, at the end, the weights."""
    folder = Path(accelerator.config.project.project_dir or ".")
    torch.manual_seed(4)
    model = torch.nn.Sequential(
        torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
    )
    data = DataLoader(
        TensorDataset(torch.arange(400.0).reshape(-1, 1) / 200),
        batch_size=2,
        shuffle=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, data)
    if (folder / "checkpoints").exists():
        accelerator.load_state()
    with (folder / f"seen-{accelerator.process_index}").open("a") as log_file:
        for (x,) in loader:
            loss = model(x).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            log_file.write(f"{x.flatten().tolist()} {loss.item()}\n")
            log_file.flush()
            time.sleep(pause)
            if accelerator.preempted:
                accelerator.save_state()
                sys.exit(PREEMPTED_EXIT_CODE)
        weights = [
            p.flatten().tolist() for p in accelerator.unwrap_model(model).parameters()
        ]
        log_file.write(f"end {weights}\n")


if __name__ == "__main__":
    train(Accelerator(cpu=True, project_dir=sys.argv[1]), pause=0.05)
