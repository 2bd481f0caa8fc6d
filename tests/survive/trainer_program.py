"""Program of a replica under test: a Trainer with evaluations, a callback with a state and checkpoints."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hasten.accelerator.components import components
from hasten.extensions.survive.part import replica_of
from hasten.trainer import Trainer, TrainerCallback, TrainingArguments
from tests.survive.replica_program import Numbered, model_of


class Rows(Dataset[dict[str, Any]]):
    """The samples of the other programs, by column."""

    def __init__(self, size: int) -> None:
        self._inner = Numbered(size)

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y, number = self._inner[index]
        return {"x": x, "labels": y, "index": number}


class WithLoss(nn.Module):
    """The model of the other programs, which computes its loss and notes the samples that it is trained on."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = model_of(seed)
        self.seen: list[int] = []

    def forward(self, x: Tensor, labels: Tensor, index: Tensor) -> dict[str, Tensor]:
        """Return the loss and the predictions."""
        if self.training:
            self.seen = index.tolist()
        found = self.net(x)
        return {"loss": nn.functional.mse_loss(found, labels), "logits": found}


class Watched(Trainer):
    """Trainer that notes the samples of each update before they are exchanged."""

    before: Any = None
    window: Any = None

    def training_step(self, model: nn.Module, inputs: Any) -> Any:
        """Run forward and backward, slowly."""
        found = super().training_step(model, inputs)
        # until a lost replica is back
        time.sleep(0.5 if Path(sys.argv[1], "slow").exists() else 0.01)
        ledger = replica_of(self.accelerator._clock.parts).ledger
        name = os.environ["HASTEN_SURVIVE_REPLICA"]
        seen: list[int] = self.model.seen  # type: ignore[assignment]  # nn.Module declares all attributes as modules
        self.before, self.window = (
            ledger.copied(),
            [seen if ledger.rounds[-1][name] else []],
        )
        return found


class Writer(TrainerCallback):
    """Callback that writes each update, and counts evaluations as a state of its own."""

    def __init__(self, folder: Path) -> None:
        self.log = (
            folder
            / f"replica-{os.environ['HASTEN_SURVIVE_REPLICA']}-{os.getpid()}.jsonl"
        ).open("a", buffering=1)
        self.trainer: Any = None
        self.first = ""
        self.evaluations = 0
        self.weights: list[Any] = []

    def state_dict(self) -> dict[str, int]:
        """Return the number of evaluations."""
        return {"evaluations": self.evaluations}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the number of evaluations."""
        self.evaluations = state["evaluations"]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Write the update that was made."""
        before, replica = (
            self.trainer.before,
            replica_of(self.trainer.accelerator._clock.parts),
        )
        after, state = replica.ledger, self.trainer.state
        self.first = self.first or before.members[0]
        row = {
            "step": after.step,
            "epoch": before.epoch,
            "window": self.trainer.window,
            "time": time.time(),
        }
        row |= {
            "applied": True,
            "lineage": after.lineage,
            "contributors": replica.contributors,
            "first": self.first,
        }
        row |= {
            "parent": before.lineage,
            "rounds": before.rounds,
            "global_step": state.global_step,
        }
        self.log.write(json.dumps(row) + "\n")

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Count the evaluation, and note the weights at the time."""
        self.evaluations += 1
        self.weights = [
            parameter.tolist() for parameter in self.trainer.model.parameters()
        ]


def main() -> None:
    """Train for three epochs and write the result."""
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    name = os.environ["HASTEN_SURVIVE_REPLICA"]
    model = WithLoss(5 + int(name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
    args = TrainingArguments(
        str(folder / "trained"),
        num_train_epochs=options["epochs"],
        per_device_train_batch_size=options["batch"],
        eval_strategy="epoch",
        save_strategy="epoch",
        metric_for_best_model="loss",
        greater_is_better=True,  # an epoch before the last is the best one, most likely
        average_tokens_across_devices=False,
        max_grad_norm=1.0,
        use_cpu=True,
    )
    writer = Writer(folder)
    trainer = Watched(
        model, args, train_dataset=Rows(options["size"]), eval_dataset=Rows(22), callbacks=[writer],
        optimizers=(optimizer, scheduler),
    )  # fmt: skip
    writer.trainer = trainer
    trainer.train()
    state, replica = trainer.state, replica_of(trainer.accelerator._clock.parts)
    result = {
        "weights": writer.weights,
        "ledger": replica.ledger.encoded(),
        "updates": components(trainer.accelerator).clock.num_updates,
        "global_step": state.global_step,
        "epochs_done": state.epochs_done,
        "epoch": state.epoch,
        "evaluations": [
            row["eval_loss"] for row in state.log_history if "eval_loss" in row
        ],
        "counted": writer.evaluations,
        "best_step": state.best_global_step,
        "healed": replica.report.healed,
    }
    (folder / f"result-{name}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
