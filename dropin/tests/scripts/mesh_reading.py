"""Who reads what on a mesh: processes of one model or sequence read the same batches, and each sample is read once."""

import os
import sys

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.data_loader import prepare_data_loader
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import gather_object


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.arange(64)


axis, dispatch = sys.argv[1], sys.argv[2] == "dispatch"
world = int(os.environ["WORLD_SIZE"])
sizes = {f"{axis}_size": 2, **({"dp_shard_size": world // 2} if world > 2 else {})}
accelerator = Accelerator(
    cpu=True,
    parallelism_config=ParallelismConfig(**sizes),
    dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch),
)
rank = accelerator.process_index
# what one process shuffles must not depend on its own random numbers
torch.manual_seed(rank)
mesh = accelerator.torch_device_mesh
indexed = DataLoader(TensorDataset(torch.arange(64)), batch_size=4, shuffle=True)
loaders = {
    "indexed": accelerator.prepare(indexed),
    "stream": accelerator.prepare(DataLoader(Stream(), batch_size=4)),
    "by hand": prepare_data_loader(
        DataLoader(TensorDataset(torch.arange(64)), batch_size=4),
        torch_device_mesh=mesh,
        dispatch_batches=False,
    ),
}
for name, loader in loaders.items():
    for epoch in range(2):
        batches = [
            (batch[0] if isinstance(batch, (list, tuple)) else batch).tolist()
            for batch in loader
        ]
        assert len(batches) == len(loader) if name != "stream" else batches, (
            name,
            len(batches),
        )
        everyone = gather_object([batches])
        alike = {tuple(map(tuple, rank_batches)) for rank_batches in everyone}
        assert len(alike) == world // 2, (
            f"{name}, epoch {epoch}: {len(alike)} different readers of {world}"
        )
        samples = sorted(
            sample
            for rank_batches in alike
            for batch in rank_batches
            for sample in batch
        )
        assert samples == list(range(64)), f"{name}, epoch {epoch}: {samples}"
    assert name == "by hand" or loader.total_batch_size == 4 * world // 2, (
        loader.total_batch_size
    )
read_samples = []
for batch in loaders["indexed"]:
    read_samples += accelerator.gather_for_metrics(batch[0]).tolist()
assert sorted(read_samples) == list(range(64)), sorted(read_samples)
print("each sample once")
