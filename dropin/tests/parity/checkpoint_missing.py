"""Loading from nowhere is an error."""

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True)
    found = []
    for place in (None, "/nowhere/at/all"):
        try:
            accelerator.load_state(place)
        except ValueError as error:
            found.append(type(error).__name__)
    return found


PROCESSES = (1, 2)
