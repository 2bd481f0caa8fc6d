"""A plain loop: losses, learning rates, weights."""

from small_loop import train

from accelerate import Accelerator


def run() -> object:
    return train(Accelerator(cpu=True))


PROCESSES = (1, 2)
