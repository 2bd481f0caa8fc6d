"""gather and reduce over nested tensors and 0-dim ones."""

import torch

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    tree = {"a": torch.arange(2) + rank, "b": [torch.tensor([[float(rank)]])]}
    gathered = accelerator.gather(tree)
    total = accelerator.reduce(torch.tensor([1.0 + rank, 2.0]), "sum")
    mean = accelerator.reduce(torch.tensor([1.0 + rank, 2.0]), "mean")
    scaled = accelerator.reduce(torch.tensor(2.0 + rank), "sum", scale=0.5)
    return [
        gathered["a"].tolist(),
        gathered["b"][0].tolist(),
        total.tolist(),
        mean.tolist(),
        scaled.tolist(),
        accelerator.gather(torch.tensor(rank)).tolist(),
    ]


PROCESSES = (1, 2)
