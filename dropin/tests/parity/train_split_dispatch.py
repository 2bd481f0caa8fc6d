"""Training on batches that the main process cuts."""

from small_loop import train

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration


def run() -> object:
    config = DataLoaderConfiguration(dispatch_batches=True, split_batches=True)
    return train(Accelerator(cpu=True, dataloader_config=config))


PROCESSES = (1, 2)
