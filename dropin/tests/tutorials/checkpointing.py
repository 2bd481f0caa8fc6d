"""Checkpoints: saving in the middle of an epoch, registered objects, and going on where the run left off."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed


class Counter:
    def __init__(self):
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def build(accelerator):
    set_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.9)
    x = torch.randn(40, 4)
    dataloader = DataLoader(
        TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True
    )
    return accelerator.prepare(model, optimizer, scheduler, dataloader)


def train(accelerator, model, optimizer, scheduler, batches, counter):
    losses = []
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        counter.seen += len(x)
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def main():
    config = ProjectConfiguration(
        project_dir="project", automatic_checkpoint_naming=True, total_limit=2
    )
    accelerator = Accelerator(project_config=config)
    model, optimizer, scheduler, dataloader = build(accelerator)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    for epoch in range(3):
        losses = train(accelerator, model, optimizer, scheduler, dataloader, counter)
        accelerator.print("epoch", epoch, losses)
        accelerator.save_state()
    accelerator.print(sorted(os.listdir("project/checkpoints")), counter.seen)

    # Some steps into the next epoch: save, go on, and do the same again from the checkpoint.
    batches = list(dataloader)
    first = train(accelerator, model, optimizer, scheduler, batches[:2], counter)
    accelerator.project_configuration.automatic_checkpoint_naming = False
    accelerator.save_state("middle")
    remaining_losses = train(
        accelerator, model, optimizer, scheduler, batches[2:4], counter
    )
    counter_at_save = counter.seen
    accelerator.print("middle", first, "rest", remaining_losses, counter_at_save)
    accelerator.load_state("middle")
    repeated_losses = train(
        accelerator, model, optimizer, scheduler, batches[2:4], counter
    )
    accelerator.print("again", repeated_losses, counter.seen == counter_at_save)

    # Only what is left of an epoch.
    skipped = accelerator.skip_first_batches(dataloader, 3)
    accelerator.print("left", len(list(skipped)))
    accelerator.save_model(model, "weights")
    accelerator.wait_for_everyone()
    accelerator.print(os.listdir("weights"))


if __name__ == "__main__":
    main()
