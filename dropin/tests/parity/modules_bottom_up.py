"""Modules in the order in which they are sharded."""

from torch import nn

from accelerate.utils import get_module_children_bottom_up


def run() -> object:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 1)))
    return [type(module).__name__ for module in get_module_children_bottom_up(model)]


PROCESSES = (1,)
