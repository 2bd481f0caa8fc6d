"""Windows that go on over the end of a loader."""

from small_loop import train

from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin


def run() -> object:
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    return train(Accelerator(cpu=True, gradient_accumulation_plugin=plugin))


PROCESSES = (1, 2)
