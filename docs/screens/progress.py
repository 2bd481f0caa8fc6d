"""Capture the progress display: a real training on two processes in a real terminal (tmux), photographed as it runs.

Run `python docs/screens/progress.py` from the root of the repository; tmux must be installed.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from capture import Screen

TRAIN = """\
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hasten import Accelerator, set_seed

set_seed(0)
accelerator = Accelerator(cpu=True)
ids = torch.randint(1000, (10_000, 32))
data = DataLoader([{"input_ids": row, "labels": row.sum() % 2} for row in ids], batch_size=16, shuffle=True)
model = nn.Sequential(nn.Embedding(1000, 64), nn.Flatten(), nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 2))
model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), data)
for epoch in accelerator.progress(range(1, 4), desc="epochs"):
    for batch in (bar := accelerator.progress(data, desc=f"epoch {epoch}")):
        if accelerator.process_index == 1:
            time.sleep(0.03)  # a slow disk, so that the hint is seen
        loss = nn.functional.cross_entropy(model(batch["input_ids"]), batch["labels"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        bar.show(loss=loss, lr=1e-3)
"""


def main() -> None:
    """Write progress.svg and progress.txt."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Screen(folder, width=132, height=12) as screen,
    ):
        Path(folder, "train.py").write_text(TRAIN, "utf-8")
        screen.press("export OMP_NUM_THREADS=1; clear", "Enter", until="$")
        screen.press(
            "hasten launch --cpu --num_processes 2 train.py",
            "Enter",
            until="epoch 2",
            seconds=90,
        )
        time.sleep(9)  # long enough for rates, and for a look at which rank is slow
        screen.save("progress", "accelerator.progress(loader)")
        screen.press("C-c", until="ended", seconds=60)


if __name__ == "__main__":
    main()
