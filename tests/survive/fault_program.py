"""Program of a replica under faults: trains, evaluates and saves, and publishes its current phase for the process that injects the faults."""

from __future__ import annotations

import json
import logging
import mmap
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils.data import DataLoader

from hasten import Accelerator
from hasten.accelerator.components import components
from hasten.extensions.survive.part import find_replica, survival_report
from tests.support.machines import enter
from tests.survive.replica_program import Numbered, evaluated, model_of

PHASES: Final = (
    "forward",
    "backward",
    "exchange",
    "step",
    "save",
    "evaluation",
    "between epochs",
)
JOINING: Final = "joining"
"""Phase of a replica that has not joined the run: it starts, or is healed."""
ENDED: Final = "ended"
NAMES: Final = (JOINING, *PHASES, "other", ENDED)


class PhaseFile:
    """Two bytes that other processes read at any instant: the phase of this process, and whether it leads."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(2))
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), 2)

    def enter(self, phase: str, leads: bool = False) -> None:
        """Publish the phase."""
        self._bytes[1] = leads
        self._bytes[0] = NAMES.index(phase)


def read_phase(path: Path) -> tuple[str, bool]:
    """Return the phase of a process, and whether it leads."""
    phase_bytes = path.read_bytes()
    return NAMES[phase_bytes[0]], bool(phase_bytes[1])


class Program:
    """The training program: a loop with phases that take some milliseconds each."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.folder, self.options = folder, options
        self.name = os.environ["HASTEN_SURVIVE_REPLICA"]
        tag = f"{self.name}-{os.getpid()}"
        self.phase = PhaseFile(folder / f"phase-{tag}")
        self.accelerator = Accelerator(
            cpu=True,
            project_dir=str(folder / "project"),
            project_config={"total_limit": 2},
        )
        # replicas start with different weights: the first one's are taken
        model = model_of(5 + int(self.name))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer.register_step_pre_hook(lambda *_: self.work())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
        loader = DataLoader(
            Numbered(options["size"]), batch_size=options["batch"], shuffle=True
        )
        # Any: prepare() returns what it was given, wrapped
        prepared: Any = self.accelerator.prepare(
            model, optimizer, loader, scheduler, evaluated()
        )
        self.model, self.optimizer, self.loader, self.scheduler, self.checked = prepared
        self.log = (folder / f"replica-{tag}.jsonl").open("a", buffering=1)
        self.evaluations = (folder / f"evaluation-{tag}.jsonl").open("a", buffering=1)
        self.replica = find_replica(self.accelerator._clock.parts)
        self.first = ""

    def enter(self, phase: str) -> None:
        """Publish the phase."""
        self.phase.enter(phase, self.replica.duties.leads)

    def work(self) -> None:
        """Take some milliseconds."""
        time.sleep(self.options["sleep"])

    def run(self) -> None:
        """Train until the epoch that the folder's file `last` names."""
        epoch, last = 0, self.folder / "last"
        while not last.exists() or epoch < int(last.read_text() or epoch + 1):
            for batch in self.loader:
                self.update(*batch)
            self.enter("evaluation")
            self.evaluate()
            self.enter("between epochs")
            self.work()
            epoch += 1
        self.enter("other")
        self.accelerator.end_training()
        self.finish()

    def update(self, x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> None:
        """Make one update, and write what was used for it."""
        ledger = self.replica.ledger
        window = [index.tolist() if ledger.rounds[-1][self.name] else []]
        self.enter("forward")
        self.work()
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.register_hook(lambda _: self.work())  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.enter("backward")
        self.accelerator.backward(loss)
        previous_ledger = ledger.make_copy()
        self.first = self.first or previous_ledger.members[0]
        self.enter("exchange")
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.enter("step")
        self.optimizer.step()
        next_ledger = self.replica.ledger
        row = {
            "step": next_ledger.step,
            "epoch": previous_ledger.epoch,
            "window": window,
            "time": time.time(),
        }
        row["applied"] = self.optimizer.last is not None and self.optimizer.last.applied
        row |= {
            "lineage": next_ledger.lineage,
            "contributors": self.replica.contributors,
            "first": self.first,
        }
        row |= {"parent": previous_ledger.lineage, "rounds": previous_ledger.rounds}
        self.log.write(json.dumps(row) + "\n")
        self.scheduler.step()
        self.optimizer.zero_grad()
        if row["applied"] and next_ledger.step % self.options["save_every"] == 0:
            self.enter("save")
            self.accelerator.save_state()
        self.enter("other")

    def evaluate(self) -> None:
        """Compute the loss of the samples that are not trained on."""
        self.model.eval()
        total = torch.zeros(())
        with torch.no_grad():
            for x, y, _ in self.checked:
                self.work()
                total += nn.functional.mse_loss(self.model(x), y)
        self.model.train()
        self.evaluations.write(
            json.dumps({"lineage": self.replica.ledger.lineage, "loss": float(total)})
            + "\n"
        )

    def finish(self) -> None:
        """Write the result of this replica."""
        report = survival_report(self.accelerator)
        result = {
            "weights": [parameter.tolist() for parameter in self.model.parameters()],
            "ledger": self.replica.ledger.to_json(),
            "updates": components(self.accelerator).clock.num_updates,
            "retries": report.num_retries,
            "pause_s": report.longest_pause_s,
            "lost": report.lost,
            "healed": report.healed,
            "returned": report.num_returned,
        }
        draft = self.folder / f"draft-{self.name}"
        draft.write_text(json.dumps(result))
        draft.rename(self.folder / f"result-{self.name}.json")
        self.phase.enter(ENDED)


def main() -> None:
    """Enter the host of this replica, and train with the options of the command line, as JSON."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    if options["network"]:
        enter(f"/run/netns/{options['network']}-{os.environ['HASTEN_SURVIVE_REPLICA']}")
    Program(folder, options).run()


if __name__ == "__main__":
    main()
