"""A model traced into stages; the last process has the output."""

import torch
from torch import nn

from accelerate import PartialState
from accelerate.inference import build_pipeline, pippy_forward


def run() -> object:
    state = PartialState(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.linspace(-1, 1, 16).view(4, 4)
    expected = model(x)
    schedule = build_pipeline(model, ["2"], (x[:2],), {}, 2)
    out = pippy_forward(schedule.step, 2, False, x)
    state.wait_for_everyone()
    return [
        type(schedule).__name__,
        None if out is None else out.tolist(),
        expected.tolist(),
    ]


PROCESSES = (2,)
