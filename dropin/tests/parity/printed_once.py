"""Printed lines come from one process."""

import io
from contextlib import redirect_stdout

from accelerate import Accelerator, PartialState


def run() -> object:
    out = io.StringIO()
    with redirect_stdout(out):
        Accelerator(cpu=True).print("hello", 3, sep="-")
        PartialState().print("again")
    return out.getvalue()


PROCESSES = (1, 2)
