"""The training of test_memory_copies: every rank leaves a line for each update, and a digest of all that it holds at the end."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hasten import Accelerator, set_seed

PAUSE_S = 0.02


class Position:
    """Updates so far."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def main(strategy: str, updates: int, every: int | None) -> None:
    set_seed(0)
    accelerator = Accelerator(
        cpu=True,
        strategy=strategy,
        checkpoint_in_memory=every,
        gradient_accumulation_steps=2,
    )
    net: Any = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.Linear(32, 1))
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    loader: Any = DataLoader(
        TensorDataset(torch.randn(64, 8), torch.randn(64, 1)),
        batch_size=4,
        shuffle=True,
    )
    net, optimizer, schedule, loader = accelerator.prepare(
        net, optimizer, schedule, loader
    )
    position = Position()
    accelerator.register_for_checkpointing(position)
    log = Path(f"updates-{accelerator.process_index}").open("a", buffering=1)  # noqa: SIM115 - until the process is killed
    log.write(
        f"resumed {position.step} {time.time()}\n"
        if accelerator.load_state(must_exist=False)
        else f"began 0 {time.time()}\n"
    )
    while position.step < updates:
        for x, y in loader:
            with accelerator.accumulate(net):
                accelerator.backward(nn.functional.mse_loss(net(x), y))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                position.step += 1
                time.sleep(PAUSE_S)
                log.write(f"step {position.step} {time.time()}\n")
    digest = hashlib.sha256(
        repr((schedule.get_last_lr(), torch.randn(4).tolist())).encode()
    )
    for tensor in accelerator.get_state_dict(net).values():
        digest.update(tensor.numpy().tobytes())
    Path(f"end-{accelerator.process_index}-{every}").write_text(digest.hexdigest())
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) or None)
