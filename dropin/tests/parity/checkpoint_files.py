"""Names of a checkpoint's main files, and a run that goes on from one."""

import os
import tempfile

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, broadcast_object_list


def run() -> object:
    folder = (
        broadcast_object_list([tempfile.mkdtemp()])[0] if Accelerator(cpu=True) else ""
    )
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(
            project_dir=folder, automatic_checkpoint_naming=True, total_limit=2
        ),
    )
    torch.manual_seed(2)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    def step():
        loss = model(torch.randn(4, 2)).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.item()

    step()
    saved_path = accelerator.save_state()
    first = [step(), step()]
    accelerator.save_state()
    accelerator.save_state()
    accelerator.wait_for_everyone()
    folder_names = sorted(os.listdir(os.path.join(folder, "checkpoints")))
    newest = os.path.join(folder, "checkpoints", folder_names[-1])
    names = [
        name
        for name in ("model.safetensors", "optimizer.bin", "scheduler.bin")
        if os.path.exists(os.path.join(newest, name))
    ]
    accelerator.load_state(newest)
    rates = scheduler.get_last_lr()
    return [
        os.path.basename(saved_path),
        folder_names,
        names,
        rates,
        accelerator.save_iteration,
        len(first),
    ]


PROCESSES = (1, 2)
