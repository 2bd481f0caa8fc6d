"""Objects of one's own in a checkpoint."""

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


class Counter:
    value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def run() -> object:
    run = setup()
    counter = Counter()
    run[0].register_for_checkpointing(counter)
    folder = shared_folder(run[0])
    counter.value = 5
    run[0].save_state(folder)
    counter.value = 0
    run[0].load_state(folder)
    try:
        run[0].register_for_checkpointing(3)
    except ValueError as error:
        return [counter.value, type(error).__name__]
    return None


PROCESSES = (1, 2)
