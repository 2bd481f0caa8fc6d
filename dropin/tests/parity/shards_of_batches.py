"""Who reads which batch, for every rule."""

from torch.utils.data import BatchSampler

from accelerate.data_loader import BatchSamplerShard


def run() -> object:
    shard_batches = []
    for size in (7, 8, 10):
        for split in (False, True):
            for even in (False, True):
                for drop in (False, True):
                    batches = BatchSampler(range(size), 4 if split else 2, drop)
                    shards = [
                        BatchSamplerShard(
                            batches, 2, rank, split_batches=split, even_batches=even
                        )
                        for rank in (0, 1)
                    ]
                    shard_batches.append(
                        [[list(shard), len(shard)] for shard in shards]
                    )
    return shard_batches


PROCESSES = (1,)
