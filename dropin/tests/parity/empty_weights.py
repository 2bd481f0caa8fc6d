"""Modules built in init_empty_weights have parameters without memory."""

from torch import nn

from accelerate import init_empty_weights


def run() -> object:
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))
    with init_empty_weights(include_buffers=True):
        empty_model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))
    later_layer = nn.Linear(2, 2)
    return [
        [str(p.device) for p in model.parameters()],
        [str(b.device) for b in model.buffers()],
        [str(b.device) for b in empty_model.buffers()],
        str(later_layer.weight.device),
    ]


PROCESSES = (1,)
