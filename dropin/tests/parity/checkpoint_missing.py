"""Loading from nowhere is an error."""

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True)
    error_names = []
    for folder in (None, "/nowhere/at/all"):
        try:
            accelerator.load_state(folder)
        except ValueError as error:
            error_names.append(type(error).__name__)
    return error_names


PROCESSES = (1, 2)
