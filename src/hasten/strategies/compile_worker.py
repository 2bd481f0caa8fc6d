"""Script of `strategies.compile_ahead` that compiles one block for given inputs, to fill the compiler's caches."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hasten import trees


def main(argv: list[str]) -> int:
    """Compile the block in the file that the parent process wrote."""
    os.nice(10)  # lower priority than the training
    sys.path[:0] = [entry for entry in _paths(argv[0]) if entry not in sys.path]
    job: dict[str, Any] = pickle.loads(Path(argv[0]).read_bytes())  # written by the parent process
    device = torch.device(job["device"])
    torch.set_float32_matmul_precision(job["tf32"])
    torch.set_num_threads(job["threads"])
    block: nn.Module = job["block"]
    for part in block.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(_filled(parameter, device), parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device)
    args, kwargs = trees.map_tensors(lambda t: _filled(t, device).requires_grad_(t.requires_grad), job["inputs"])
    block.train().compile(**job["options"])
    with torch.autocast(device.type, job["autocast"], enabled=job["autocast"] is not None):
        out = block(*args, **kwargs)
    losses = [tensor.float().sum() for tensor in trees.tensors(out) if tensor.requires_grad]
    torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return 0


def _filled(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).zero_()


def _paths(file: str) -> list[str]:
    """Return the import paths of the training script."""
    found: list[str] = Path(f"{file}.paths").read_text(encoding="utf-8").split("\0")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
