"""What test_xla_hosts.py runs on each host: python host_program.py FOLDER SCENARIO..., in a world of several processes.

Each scenario is the name of a function here with its arguments as JSON; what it returns is written to FOLDER/<number>.<rank>.pt.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hasten import Accelerator, set_seed
from hasten.errors import DivergenceError, HastenError
from tests.xla.training import Run, net

# Any in this file: prepared objects, and results of scenarios.

ROWS = 4
"""Rows in a batch of one host."""
NORM = nn.LayerNorm
"""Without statistics of a batch, which would differ between hosts."""
RETAINED: list[Any] = []
"""What is not to be freed before the process ends."""


def samples(count: int) -> TensorDataset:
    """Rows with their number, a class, and a class that follows from it."""
    number = torch.arange(count)
    x = number * 7 % 10
    return TensorDataset(number, x, (x * 3 + number % 3) % 10)


def made(
    count: int, every: int, clip: float | None, shards: bool, dropout: float = 0.0
) -> Run:
    """A training of this host, with weights that differ between hosts before they are prepared."""
    model = net(NORM, dropout, seed=5 + int(os.environ["RANK"]))
    return Run.made(
        model,
        samples(count),
        ROWS,
        every,
        clip,
        shards=shards,
        trust={"divergence_every": 4},
    )


def result(run: Run) -> dict[str, Any]:
    """Losses, rows and numbers of this host."""
    run.accelerator.end_training()
    return {
        "losses": [float(loss) for loss in run.losses],
        "rows": run.rows,
        "numbers": run.numbers(),
    }


def train(
    folder: Path, count: int, every: int, clip: float | None, shards: bool
) -> dict[str, Any]:
    """A whole epoch."""
    return result(made(count, every, clip, shards).train())


def resume(folder: Path, every: int, stop: int, shards: bool) -> dict[str, Any]:
    """An epoch that is saved on its way, and another that goes on from there; random numbers differ between hosts."""
    set_seed(3, device_specific=True)
    count = 12 * ROWS * 2
    first_training = made(count, every, 0.5, shards, dropout=0.2)
    saved = folder / f"saved-{every}-{stop}-{shards}"
    first_training.train(stop, saved)
    set_seed(99)
    resumed_training = made(count, every, 0.5, shards, dropout=0.2)
    resumed_training.accelerator.load_state(saved)
    resumed_training.train()
    files = sorted(
        str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file()
    )
    return {
        "whole": result(first_training),
        "again": result(resumed_training),
        "files": files,
    }


def meet(folder: Path) -> dict[str, Any]:
    """Metrics, collectives, and what else goes between hosts."""
    accelerator = Accelerator(strategy="xla")
    rank, device = accelerator.process_index, accelerator.device
    loader = accelerator.prepare(DataLoader(samples(21), batch_size=ROWS))
    numbers: list[int] = []
    names: list[str] = []
    for number, _, _ in loader:
        numbers += accelerator.gather_for_metrics(number).tolist()
        names += accelerator.gather_for_metrics(
            [str(row_number) for row_number in number.tolist()], use_gather_object=True
        )
    rank_tensor = torch.tensor([float(rank), 2.0], device=device)
    accelerator.wait_for_everyone()
    set_seed(1, device_specific=True)
    drawn = nn.functional.dropout(torch.ones(64, device=device)).cpu()
    return {
        "numbers": numbers,
        "names": names,
        "world": (rank, accelerator.num_processes),
        "gathered": accelerator.gather(rank_tensor).cpu(),
        "summed": accelerator.reduce(rank_tensor, "sum").cpu(),
        "mean": accelerator.reduce(rank_tensor, "mean").cpu(),
        "drawn": drawn,
    }


class Branches(nn.Module):
    """A layer that host 0 alone uses, one that nobody uses, and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.rare, self.never = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 4),
        )
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor, rare: bool) -> Tensor:
        """One number for each value."""
        hidden: Tensor = self.common(self.norm(x))
        return self.rare(hidden) if rare else hidden


def branches(folder: Path) -> dict[str, Any]:
    """Gradients that only some hosts have, and plain backward() on two losses."""
    accelerator = Accelerator(strategy="xla", trust={"divergence_every": 1})
    rank = accelerator.process_index
    torch.manual_seed(5 + rank)
    model = Branches()
    initial_state = {name: value.clone() for name, value in model.state_dict().items()}
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1.0)
    )
    x = torch.randn(8, 4)
    first = model(x.to(accelerator.device), rank == 0).square().mean()
    first.backward()
    model(x.to(accelerator.device) + 1, False).square().mean().backward()
    grads = {
        name: None if p.grad is None else p.grad.cpu()
        for name, p in model.named_parameters()
    }
    optimizer.step()
    accelerator.end_training()
    final_state = {name: value.cpu() for name, value in model.state_dict().items()}
    return {"before": initial_state, "after": final_state, "grads": grads, "x": x}


def wrong(folder: Path) -> dict[str, Any]:
    """What is refused or found on every host when one of them differs."""
    accelerator = Accelerator(strategy="xla", trust={"divergence_every": 1})
    rank = accelerator.process_index
    messages = {}
    for name, model in (
        ("shapes", nn.Linear(4, 4 + rank)),
        ("names", nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + rank)))),
    ):
        try:
            accelerator.prepare(model)
        except HastenError as error:
            messages[name] = f"{type(error).__name__}: {error}"
    model, optimizer = accelerator.prepare(net(NORM), torch.optim.SGD)
    try:
        for _ in range(30):
            accelerator.backward(
                model(torch.arange(4, device=accelerator.device)).square().mean()
            )
            optimizer.step()
            with torch.no_grad():
                model.norm.bias.add_(float(rank))
    except DivergenceError as error:
        messages["weights"] = str(error)
    try:
        accelerator.join_uneven_inputs([model]).__enter__()
    except HastenError as error:
        messages["join"] = str(error)
    return messages


def late(folder: Path, last: int) -> int:
    """A short training whose hosts end at different times; every Accelerator lives to the end."""
    run = made(4 * ROWS, 1, None, shards=False).train()
    RETAINED.append(run)
    if run.accelerator.process_index == last:
        time.sleep(4)
    return last


def scenarios(words: list[str]) -> Iterator[tuple[str, list[Any]]]:
    """Names and arguments."""
    for word in words:
        name, _, arguments = word.partition(" ")
        yield name, json.loads(arguments or "[]")


if __name__ == "__main__":
    out_folder, scenario_functions = Path(sys.argv[1]), globals()
    accelerator = Accelerator(strategy="xla")
    for turn, (name, args) in enumerate(scenarios(sys.argv[2:])):
        outcome = scenario_functions[name](out_folder, *args)
        torch.save(outcome, out_folder / f"{turn}.{accelerator.process_index}.pt")
