"""bf16 by autocast: losses and output types."""

from small_loop import train

from accelerate import Accelerator


def run() -> object:
    return train(Accelerator(cpu=True, mixed_precision="bf16"))


PROCESSES = (1, 2)
