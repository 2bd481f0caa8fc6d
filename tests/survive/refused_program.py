"""Program of a replica that tries what is refused, and prints the messages as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hasten import Accelerator, skip_first_batches
from hasten.errors import HastenError


def message(call: Callable[[], object]) -> str:
    """Return the error's text; empty if nothing was raised."""
    try:
        call()
    except HastenError as error:
        return str(error)
    return ""


def main() -> None:
    """Try each call, then leave."""
    accelerator = Accelerator(cpu=True)
    model: Any = nn.Linear(1, 1)
    loader: Any = DataLoader(TensorDataset(torch.zeros(8, 1)), batch_size=2)
    model, loader, _, _ = accelerator.prepare(
        model,
        loader,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.optim.SGD(model.parameters(), lr=0.1),
    )
    messages = {
        "skip_first_batches": message(lambda: list(skip_first_batches(loader, 1))),
        "optimizers": message(lambda: next(iter(loader))),
    }
    Path(sys.argv[1]).write_text(json.dumps(messages))
    accelerator.end_training()


if __name__ == "__main__":
    main()
