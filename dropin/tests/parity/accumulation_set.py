"""The number of micro-steps can be set after the Accelerator was made."""

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True)
    accelerator.gradient_accumulation_steps = 4
    return [
        accelerator.gradient_accumulation_steps,
        accelerator.gradient_state.num_steps,
    ]


PROCESSES = (1, 2)
