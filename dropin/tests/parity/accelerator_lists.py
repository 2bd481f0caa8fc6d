"""The lists of what was prepared, and the switches an Accelerator shows."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.prepare(
        model,
        optimizer,
        torch.optim.lr_scheduler.StepLR(optimizer, 1),
        DataLoader(TensorDataset(torch.arange(8)), batch_size=2),
    )
    lists = (
        accelerator._models,
        accelerator._optimizers,
        accelerator._schedulers,
        accelerator._dataloaders,
    )
    switches = "split_batches even_batches dispatch_batches use_seedable_sampler non_blocking use_stateful_dataloader"
    return [
        [len(prepared_list) for prepared_list in lists],
        [getattr(accelerator, name) for name in switches.split()],
        accelerator.native_amp,
        accelerator.scaler is None,
        accelerator.is_fsdp2,
        accelerator.step,
    ]


PROCESSES = (1, 2)
