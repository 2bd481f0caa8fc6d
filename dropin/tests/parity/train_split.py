"""Training with the global batch size."""

from small_loop import train

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration


def run() -> object:
    return train(
        Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True)
        )
    )


PROCESSES = (1, 2)
