"""Clamping gradients."""

from small_loop import train

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True)
    return train(
        accelerator,
        lambda model: accelerator.clip_grad_value_(model.parameters(), 0.01),
    )


PROCESSES = (1, 2)
