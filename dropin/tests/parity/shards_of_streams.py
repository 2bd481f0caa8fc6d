"""Who reads which sample of a stream, for every rule."""

import torch
from torch.utils.data import IterableDataset

from accelerate.data_loader import IterableDatasetShard


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(16))

    def __len__(self):
        return 16


def run() -> object:
    shard_rows = []
    for split in (False, True):
        for drop in (False, True):
            for rank in (0, 1, 2):
                shard = IterableDatasetShard(
                    Stream(),
                    3,
                    drop_last=drop,
                    num_processes=3,
                    process_index=rank,
                    split_batches=split,
                )
                shard_rows.append([int(row) for row in shard])
    return shard_rows


PROCESSES = (1,)
