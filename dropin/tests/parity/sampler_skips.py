"""Batches left out at the front."""

from torch.utils.data import BatchSampler

from accelerate.data_loader import SkipBatchSampler


def run() -> object:
    skipped = SkipBatchSampler(BatchSampler(range(9), 2, False), 2)
    return [list(skipped), len(skipped)]


PROCESSES = (1,)
