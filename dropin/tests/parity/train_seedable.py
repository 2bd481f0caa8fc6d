"""Training with the seedable sampler."""

from small_loop import train

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration


def run() -> object:
    return train(
        Accelerator(
            cpu=True,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        )
    )


PROCESSES = (1, 2)
