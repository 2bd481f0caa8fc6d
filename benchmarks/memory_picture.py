"""A step that does not fit into the GPU: prints the error with its report, and checks the picture and snapshot that were written.

    python benchmarks/memory_picture.py runs/memory

Needs a CUDA device; its whole memory is filled.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import torch
from torch import Tensor, nn

from hasten import Accelerator


def main(folder: Path) -> None:
    """Fill the device with one sample, and look at what hasten says."""
    accelerator = Accelerator(project_dir=str(folder))
    if accelerator.device.type != "cuda":
        raise SystemExit("this needs a CUDA device")
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4096, 4096), nn.GELU()) for _ in range(8)))
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))

    def step(rows: Tensor) -> Tensor:
        loss: Tensor = model(rows).square().mean()
        accelerator.backward(loss)
        return loss

    small = torch.randn(2, 128, 4096, device=accelerator.device)
    step(small)
    optimizer.step()
    optimizer.zero_grad()
    picture = Path(accelerator.memory_snapshot())
    parts = json.loads(picture.with_suffix(".json").read_text())["parts"]
    total = torch.cuda.mem_get_info()[1]
    assert sum(parts.values()) == total, (parts, total)
    assert picture.with_suffix(".pickle").stat().st_size > 0
    print(f"snapshot: {picture}: {parts}")
    tokens = int(total / 4096 / 4 / 10)  # one sample whose activations of ten layers fill the device
    try:
        with accelerator.accumulate(model):
            step(torch.randn(1, 1, 4096, device=accelerator.device).expand(2, tokens, 4096))
    except torch.OutOfMemoryError as error:
        print(error, *error.__notes__, sep="\n")
    else:
        raise SystemExit("the sample was meant to be too large")
    pictures = sorted(folder.glob("memory-*.svg"))
    for one in pictures:
        ElementTree.fromstring(one.read_text())
    print(f"{len(pictures)} pictures in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/memory"))
