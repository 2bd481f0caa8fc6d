"""Groups, defaults and state written on the prepared optimizer are the inner one's."""

import torch
from torch import nn

from accelerate import Accelerator


def run() -> object:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared = Accelerator(cpu=True).prepare(optimizer)
    prepared.param_groups = [{"params": list(model.parameters()), "lr": 0.5}]
    prepared.defaults = {"lr": 0.25}
    prepared.state = {"x": 1}
    return [
        optimizer.param_groups[0]["lr"],
        optimizer.defaults,
        optimizer.state,
        prepared.train(),
        prepared.eval(),
    ]


PROCESSES = (1, 2)
