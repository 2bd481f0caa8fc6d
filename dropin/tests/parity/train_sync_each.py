"""Gradients synchronised in every micro-step."""

from small_loop import train

from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin


def run() -> object:
    return train(
        Accelerator(
            cpu=True,
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=3, sync_each_batch=True
            ),
        )
    )


PROCESSES = (1, 2)
