"""Accumulation: two small batches step like one large one; clipping and the schedule happen where gradients are whole."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed


def main():
    set_seed(0)
    x = torch.linspace(-1, 1, 64).view(-1, 1)
    dataset = TensorDataset(x, 2 * x + 3)
    model = nn.Linear(1, 1)
    model_clone = copy.deepcopy(model)
    criterion = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.5)

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, dataloader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(dataset, batch_size=4), scheduler
    )
    accelerator.print(f"initial weight {model_clone.weight.item():.6f}")
    for epoch in range(2):
        for index, (inputs, targets) in enumerate(dataloader):
            with accelerator.accumulate(model):
                loss = criterion(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    accelerator.print(
                        "step",
                        epoch,
                        index,
                        "norm",
                        float(norm),
                        scheduler.get_last_lr(),
                    )
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    unwrapped = accelerator.unwrap_model(model)
    accelerator.print("accumulated", unwrapped.weight.item(), unwrapped.bias.item())

    # The same with whole batches on one process, without the clipping: the first step's gradients are alike.
    large_loader = DataLoader(dataset, batch_size=8 * accelerator.num_processes)
    inputs, targets = next(iter(large_loader))
    criterion(model_clone(inputs), targets).backward()
    accelerator.print(
        "one whole batch", model_clone.weight.grad.item(), model_clone.bias.grad.item()
    )

    # By hand: no_sync on the micro-steps in between.
    hand = accelerator.prepare(copy.deepcopy(unwrapped))
    batches = list(dataloader)
    with accelerator.no_sync(hand):
        accelerator.backward(criterion(hand(batches[0][0]), batches[0][1]))
    accelerator.backward(criterion(hand(batches[1][0]), batches[1][1]))
    accelerator.print("by hand", accelerator.unwrap_model(hand).weight.grad.item())


if __name__ == "__main__":
    main()
