"""prepare() lets unknown objects through, in order."""

from torch import nn

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True)
    model, number, word, nothing = accelerator.prepare(nn.Linear(1, 1), 3, "x", None)
    return [isinstance(model, nn.Module), number, word, nothing, accelerator.prepare(5)]


PROCESSES = (1, 2)
