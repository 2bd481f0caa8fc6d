"""Small pieces: gather, reduce, pad, broadcast, and metrics over a loader whose end was filled up."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import (
    broadcast,
    broadcast_object_list,
    gather,
    pad_across_processes,
    reduce,
)


def main():
    accelerator = Accelerator()
    rank = accelerator.process_index
    rank_tensor = torch.arange(2.0, device=accelerator.device) + 10 * rank
    accelerator.print(
        "gather",
        accelerator.gather(rank_tensor).tolist(),
        gather({"a": [rank_tensor]})["a"][0].tolist(),
    )
    accelerator.print("sum", accelerator.reduce(rank_tensor, reduction="sum").tolist())
    accelerator.print("mean", reduce(rank_tensor, reduction="mean").tolist())
    accelerator.print("from the first", gather(broadcast(rank_tensor.clone())).tolist())
    words = ["from", rank]
    broadcast_object_list(words)
    accelerator.print("objects", words)

    uneven = torch.full((1, 2 + rank), float(rank))
    padded = accelerator.pad_across_processes(uneven, dim=1, pad_index=-100)
    accelerator.print("padded", accelerator.gather(padded).tolist())
    accelerator.print(
        "at the front",
        gather(pad_across_processes(uneven, dim=1, pad_first=True)).tolist(),
    )

    dataloader = accelerator.prepare(
        DataLoader(TensorDataset(torch.arange(11)), batch_size=4)
    )
    everything, metric_rows = [], []
    for (numbers,) in dataloader:
        everything += accelerator.gather(numbers).tolist()
        metric_rows += accelerator.gather_for_metrics(numbers).tolist()
    accelerator.print("gathered", everything)
    accelerator.print("for metrics", metric_rows)
    objects = []
    for (numbers,) in dataloader:
        objects += accelerator.gather_for_metrics(
            [str(n) for n in numbers.tolist()], use_gather_object=True
        )
    accelerator.print("objects for metrics", objects)


if __name__ == "__main__":
    main()
