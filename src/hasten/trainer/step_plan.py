"""Plan of a training: the number of updates, and the steps that log, evaluate and save. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hasten.errors import ConfigError
from hasten.trainer.arguments import TrainingArguments


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Numbers of steps and epochs of a training, computed before its first step."""

    max_steps: int
    num_epochs: int
    batches_per_epoch: int | None
    logging_steps: int
    eval_steps: int
    save_steps: int

    def due(self, when: str, every: int, step: int) -> bool:
        """Return whether an action with this strategy is due after update number `step`."""
        return when == "steps" and step % every == 0


def plan_training(args: TrainingArguments, batches_per_epoch: int | None, window: int) -> TrainingPlan:
    """Return the plan for a loader of this length (None for streams) and accumulation windows of `window` batches.

    Raises: ConfigError if the number of updates cannot be determined, or there is no batch.
    """
    if batches_per_epoch is None and args.max_steps < 0:
        raise ConfigError(
            "the training dataset has no length, so num_train_epochs does not say when to stop or how to schedule the "
            "learning rate; set max_steps."
        )
    if batches_per_epoch == 0:
        raise ConfigError(
            "the training dataset yields no batch, so there is nothing to train on; check its length, the batch size and "
            "dataloader_drop_last."
        )
    per_epoch = None if batches_per_epoch is None else math.ceil(batches_per_epoch / window)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * (per_epoch or 0))
    epochs = math.ceil(steps / per_epoch) if per_epoch else 0
    return TrainingPlan(
        max_steps=steps,
        num_epochs=epochs,
        batches_per_epoch=batches_per_epoch,
        logging_steps=_steps(args.logging_steps, steps),
        eval_steps=_steps(args.eval_steps or args.logging_steps, steps),
        save_steps=_steps(args.save_steps, steps),
    )


def _steps(given: float, total: int) -> int:
    """Return a number of updates; a value below 1 is a fraction of the total."""
    return math.ceil(given * total) if given < 1 else int(given)
