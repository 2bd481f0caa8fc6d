"""Training goes on from a checkpoint with the same losses."""

import tempfile

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list


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
    run = setup()
    folder = shared_folder(run[0])
    first = steps(*run, 2)
    run[0].save_state(folder)
    second = steps(*run, 3)
    run[0].load_state(folder)
    return [first, second, steps(*run, 3)]


PROCESSES = (1, 2)
