"""A run that saves in the middle of an epoch and goes on, or goes on from such a checkpoint: exchange.py save|load FOLDER OUT."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed


class Counter:
    """An object that is registered for checkpointing."""

    seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "halves": torch.full((2,), self.seen / 2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def main(mode: str, folder: str, out: str) -> None:
    config = DataLoaderConfiguration(
        use_stateful_dataloader=True, use_seedable_sampler=True, data_seed=3
    )
    accelerator = Accelerator(
        cpu=True, dataloader_config=config, gradient_accumulation_steps=2
    )
    set_seed(7 if mode == "save" else 99)
    model: Any = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    loader: Any = DataLoader(
        torch.arange(64.0).reshape(32, 2) / 64, batch_size=2, shuffle=True
    )  # type: ignore[arg-type] # a tensor is a dataset
    model, optimizer, schedule, loader = accelerator.prepare(
        model, optimizer, schedule, loader
    )
    counter, rows = Counter(), []
    accelerator.register_for_checkpointing(counter)
    if mode == "load":
        accelerator.load_state(folder)
    step = accelerator.step
    for index, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = (model(batch) - 1).pow(2).mean() + random.random() + np.random.rand()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        counter.seen += 1
        rows.append(
            [batch.tolist(), loss.item(), schedule.get_last_lr()[0], counter.seen]
        )
        if mode == "save" and index == 3:
            accelerator.save_state(folder)
            step, rows = accelerator.step, []
    result = accelerator.gather_for_metrics(
        [{"step": step, "rows": rows}], use_gather_object=True
    )
    if accelerator.is_main_process:
        Path(out).write_text(json.dumps(result))
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
