"""Stages by hand on two processes; every one prints the output's distance from the whole model's."""

import torch
from torch import nn

from accelerate import PartialState
from accelerate.inference import build_pipeline, pippy_forward

state = PartialState(cpu=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
batch = torch.linspace(-1, 1, 12).view(3, 4)  # one row short of two chunks
expected = model(batch)
schedule = build_pipeline(model, ["2"], (batch[:2],), {}, 2)
output = pippy_forward(schedule.step, 2, True, batch)
print(tuple(output.shape), (output - expected).abs().max().item())
state.destroy_process_group()
