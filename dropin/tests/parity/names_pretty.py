"""Names of objects for messages; attributes by path."""

from torch import nn

from accelerate.utils import get_pretty_name, recursive_getattr


def run() -> object:
    model = nn.Sequential(nn.Linear(2, 3))
    return [
        get_pretty_name(nn.Linear),
        get_pretty_name(model),
        get_pretty_name(len),
        list(recursive_getattr(model, "0.weight").shape),
    ]


PROCESSES = (1,)
