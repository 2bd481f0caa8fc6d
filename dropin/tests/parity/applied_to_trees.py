"""A function on every tensor of a nested container, which keeps its type."""

from collections import UserDict, namedtuple

import torch

from accelerate.utils import find_device, honor_type, recursively_apply


def run() -> object:
    Pair = namedtuple("Pair", "a b")
    tree = {
        "x": [torch.ones(2), (torch.zeros(1), 3)],
        "p": Pair(torch.ones(1), "s"),
        "u": UserDict(q=torch.ones(1)),
    }
    incremented = recursively_apply(lambda tensor: tensor + 1, tree)
    return [
        str(incremented),
        type(incremented["p"]).__name__,
        type(incremented["u"]).__name__,
        str(find_device(tree)),
        str(find_device({"a": 1})),
        str(honor_type(Pair(1, 2), iter((3, 4)))),
    ]


PROCESSES = (1,)
