"""A second Accelerator may not change the precision."""

from accelerate import Accelerator


def run() -> object:
    Accelerator(cpu=True, mixed_precision="no")
    try:
        Accelerator(mixed_precision="bf16")
    except ValueError as error:
        return str(error)
    return None


PROCESSES = (1, 2)
