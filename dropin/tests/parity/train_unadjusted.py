"""Schedulers that do not count micro-steps."""

from small_loop import train

from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin


def run() -> object:
    plugin = GradientAccumulationPlugin(num_steps=2, adjust_scheduler=False)
    return train(Accelerator(cpu=True, gradient_accumulation_plugin=plugin))


PROCESSES = (1, 2)
