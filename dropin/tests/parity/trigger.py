"""A flag that any rank may set."""

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True)
    initial_trigger = accelerator.check_trigger()
    if accelerator.is_last_process:
        accelerator.set_trigger()
    return [initial_trigger, accelerator.check_trigger(), accelerator.check_trigger()]


PROCESSES = (1, 2)
