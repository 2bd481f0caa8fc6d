"""Accumulation in whole windows."""

from small_loop import train

from accelerate import Accelerator


def run() -> object:
    return train(Accelerator(cpu=True, gradient_accumulation_steps=3))


PROCESSES = (1, 2)
