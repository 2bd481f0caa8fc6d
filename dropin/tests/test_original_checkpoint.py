"""A checkpoint that the original package wrote goes on here with the same losses."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

GOLDEN = Path(__file__).parent / "golden" / "checkpoint"


def test_training_goes_on_from_the_originals_files() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.load_state(str(GOLDEN))
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 2)).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    recorded = json.loads((GOLDEN / "losses.json").read_text())
    assert torch.allclose(torch.tensor(losses), torch.tensor(recorded), atol=1e-6)
    AcceleratorState._reset_state(True)
