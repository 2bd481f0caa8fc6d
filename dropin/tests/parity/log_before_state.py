"""A logger used before any Accelerator says so."""

from accelerate.logging import get_logger


def run() -> object:
    try:
        get_logger("parity_early").info("x")
    except RuntimeError as error:
        return type(error).__name__
    return None


PROCESSES = (1,)
