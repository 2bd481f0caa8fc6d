"""Program of a replica under test: trains a small model and writes what it saw to a folder."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from hasten import PREEMPTED_EXIT_CODE, Accelerator
from hasten.accelerator.components import components
from hasten.extensions.survive.ledger_plan import rank_positions
from hasten.extensions.survive.part import find_replica, survival_report
from tests.survive.group_faults import Faults

_EVALUATED: Final = 10_000
"""First index of the samples that are evaluated."""


class Numbered(Dataset[tuple[Tensor, Tensor, int]]):
    """Samples that are computed from their index."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(8, generator=generator)
        return x, x[:1] * 2 + 0.5 * x[1:2] ** 2, index


def model_of(seed: int = 5) -> nn.Module:
    """Return the model, with weights of this seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def whole(parameter: Any) -> Tensor:  # Any: a sharded tensor has more methods
    """Return a parameter whose shards lie on the ranks of a replica."""
    full_tensor: Tensor = (
        parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    )
    return full_tensor


def evaluated() -> DataLoader[tuple[Tensor, Tensor, int]]:
    """Return the loader of the samples that are evaluated."""
    data = Numbered(_EVALUATED + 24)
    return DataLoader(Subset(data, range(_EVALUATED, _EVALUATED + 24)), batch_size=4)


def last_epoch(folder: Path, options: dict[str, Any]) -> float:
    """Return the number of epochs; with the option `open`, or without a number, the run continues until the folder's file `last` has it."""
    last = folder / "last"
    if not options["open"] and options["epochs"] is not None:
        return float(options["epochs"])
    return float(last.read_text()) if last.exists() else math.inf


def hang(order: Path) -> None:
    """Sleep for the seconds in a file, once."""
    if order.exists() and (seconds := order.read_text()):
        order.unlink()
        time.sleep(float(seconds))


def main() -> None:
    """Train with the options of the command line, as JSON."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    options = json.loads(sys.argv[2])
    folder = Path(sys.argv[1])
    name = os.environ["HASTEN_SURVIVE_REPLICA"]
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=options["every"],
        project_dir=str(folder / "project"),
    )
    # replicas start with different weights: the first one's are taken
    model = model_of(5 + int(name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
    loader = DataLoader(
        Numbered(options["size"]),
        batch_size=options["batch"],
        shuffle=True,
        num_workers=options["workers"],
    )
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, loader, scheduler
    )
    if options["preemptible"]:
        accelerator.load_state(must_exist=False)
    rank = accelerator.process_index
    process_name = name if options["ranks"] == 1 else f"{name}.{rank}"
    log = (folder / f"replica-{process_name}-{os.getpid()}.jsonl").open(
        "a", buffering=1
    )
    replica = find_replica(accelerator._clock.parts)
    faults = Faults(folder, options["faults"], replica, rank, options["replicas"])
    if options["faults"]:
        faults.watch(model, optimizer.optimizer)
    window: list[list[int]] = []
    first = ""
    while loader.epoch < last_epoch(folder, options):
        for x, y, index in loader:
            with accelerator.accumulate(model):
                if replica.ledger.rounds and not rank_positions(
                    replica.ledger.rounds[-1][name], rank, options["ranks"]
                ):
                    window.append([])
                else:
                    window.append(index.tolist())
                loss = faults.in_backward(nn.functional.mse_loss(model(x), y))
                time.sleep(options["sleep"])
                hang(folder / f"hang-{name}")
                accelerator.backward(
                    loss, weight=len(x) if options["weighted"] else None
                )
                previous_ledger = replica.ledger.make_copy()
                first = first or previous_ledger.members[0]
                if accelerator.sync_gradients and options["clip"]:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if accelerator.sync_gradients:
                    row = {
                        "step": replica.ledger.step,
                        "epoch": previous_ledger.epoch,
                        "window": window,
                        "time": time.time(),
                    }
                    row["applied"] = (
                        optimizer.last is not None and optimizer.last.applied
                    )
                    row |= {
                        "lineage": replica.ledger.lineage,
                        "contributors": replica.contributors,
                        "first": first,
                    }
                    row |= {
                        "parent": previous_ledger.lineage,
                        "rounds": previous_ledger.rounds,
                    }
                    log.write(json.dumps(row) + "\n")
                    window = []
                scheduler.step()
                optimizer.zero_grad()
            if options["preemptible"] and accelerator.preempted:
                checkpoint_path = accelerator.save_state()
                (folder / f"left-{name}-{os.getpid()}.json").write_text(
                    json.dumps([replica.ledger.step, checkpoint_path])
                )
                sys.exit(PREEMPTED_EXIT_CODE)
    accelerator.end_training()
    report = survival_report(accelerator)
    result = {
        "weights": [whole(parameter).tolist() for parameter in model.parameters()],
        "lr": scheduler.get_last_lr(),
        "ledger": replica.ledger.to_json(),
        "updates": components(accelerator).clock.num_updates,
        "retries": report.num_retries,
        "pause_s": report.longest_pause_s,
        "lost": report.lost,
        "healed": report.healed,
        "joined": report.joined,
        "returned": report.num_returned,
        "leads": accelerator.is_main_process,
    }
    (folder / f"result-{process_name}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
