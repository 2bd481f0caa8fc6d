"""Program of a replica under test: saves in the middle of an epoch and stops, or resumes from there to the end."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from hasten import Accelerator
from tests.survive.replica_program import Numbered, model_of, whole


def main() -> None:
    """Train up to the update given, or from a checkpoint to the end; write the indices of each update."""
    folder, stop = Path(sys.argv[1]), int(sys.argv[2])
    accelerator = Accelerator(cpu=True, project_dir=str(folder / "project"))
    model = model_of(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Numbered(120), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if not stop:
        accelerator.load_state(folder / "saved")
    step, name = (
        0,
        f"{os.environ['HASTEN_SURVIVE_REPLICA']}.{accelerator.process_index}",
    )
    used_indices: list[int] = []
    for _ in range(2):
        for x, y, index in loader:
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            used_indices += index.tolist()
            step += 1
            if step == stop:
                accelerator.save_state(folder / "saved")
                break
        if step == stop:
            break
    accelerator.end_training()
    weights = [whole(parameter).tolist() for parameter in model.parameters()]
    (folder / f"{'first' if stop else 'second'}-{name}.json").write_text(
        json.dumps({"seen": used_indices, "weights": weights})
    )


if __name__ == "__main__":
    main()
