"""skip_first_batches on a prepared and on a plain loader."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, skip_first_batches
from accelerate.utils import gather_object


def run() -> object:
    plain = DataLoader(TensorDataset(torch.arange(12)), batch_size=2)
    loader = Accelerator(cpu=True).prepare(
        DataLoader(TensorDataset(torch.arange(12)), batch_size=2)
    )
    skipped = skip_first_batches(loader, 1)
    return gather_object(
        [
            [
                [x.tolist() for (x,) in skipped],
                [x.tolist() for (x,) in skip_first_batches(plain, 4)],
            ]
        ]
    )


PROCESSES = (1, 2)
