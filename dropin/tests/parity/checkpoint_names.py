"""Automatic names, and the oldest deleted."""

import tempfile
from pathlib import Path

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, broadcast_object_list


def setup(**options):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, **options)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(
        model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    )


def steps(accelerator, model, optimizer, scheduler, count):
    losses = []
    for step in range(count):
        loss = model(torch.full((1, 2), 1.0 + step)).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def shared_folder(accelerator):
    folders = [tempfile.mkdtemp() if accelerator.is_main_process else None]
    return broadcast_object_list(folders)[0]


def run() -> object:
    first = Accelerator(cpu=True)
    folder = shared_folder(first)
    config = ProjectConfiguration(
        project_dir=folder, automatic_checkpoint_naming=True, total_limit=2
    )
    run = setup(project_config=config)
    for _ in range(3):
        steps(*run, 1)
        run[0].save_state()
    run[0].wait_for_everyone()
    return [
        sorted(path.name for path in (Path(folder) / "checkpoints").iterdir()),
        run[0].save_iteration,
    ]


PROCESSES = (1, 2)
