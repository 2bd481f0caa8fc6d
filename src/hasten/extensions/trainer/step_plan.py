"""Plan of a training: the number of updates, and the steps that log, evaluate and save. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hasten.errors import ConfigError
from hasten.extensions.trainer.arguments import TrainingArguments


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Numbers of steps and epochs of a training, computed before its first step."""

    max_steps: int
    """Updates of the whole training, if all of it runs on this number of processes."""
    num_epochs: int
    batches_per_epoch: int | None
    last_epoch_batches: int | None
    """Batches of the last epoch to train on; None if the training ends after `max_steps` updates."""
    window: int
    logging_steps: int
    eval_steps: int
    save_steps: int

    def due(self, when: str, every: int, step: int) -> bool:
        """Return whether an action with this strategy is due after update number `step`."""
        return when == "steps" and step % every == 0

    def is_complete(
        self, global_step: int, epochs_done: int, batches_in_epoch: int
    ) -> bool:
        """Return whether this progress is the end of the training, which epochs determine on any number of processes."""
        if self.last_epoch_batches is None:
            return global_step >= self.max_steps
        in_last_epoch = epochs_done == self.num_epochs - 1
        return epochs_done >= self.num_epochs or (
            in_last_epoch and batches_in_epoch >= self.last_epoch_batches
        )

    def num_updates_left(self, epochs_done: int, batches_in_epoch: int) -> int:
        """Return the number of updates between this progress and the last epoch's end."""
        assert self.last_epoch_batches is not None, "epochs determine the end"
        assert self.batches_per_epoch is not None, "epochs determine the end"
        if epochs_done >= self.num_epochs:
            return 0
        in_last_epoch = epochs_done == self.num_epochs - 1
        if in_last_epoch:
            num_batches = self.last_epoch_batches
        else:
            num_batches = self.batches_per_epoch
        num_updates = math.ceil(max(num_batches - batches_in_epoch, 0) / self.window)
        if in_last_epoch:
            return num_updates
        num_whole_epochs = self.num_epochs - epochs_done - 2
        num_updates += num_whole_epochs * math.ceil(
            self.batches_per_epoch / self.window
        )
        return num_updates + math.ceil(self.last_epoch_batches / self.window)


def plan_training(
    args: TrainingArguments, batches_per_epoch: int | None, window: int
) -> TrainingPlan:
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
    if batches_per_epoch is None:
        per_epoch = None
    else:
        per_epoch = math.ceil(batches_per_epoch / window)
    if args.max_steps > 0:
        max_steps = args.max_steps
    else:
        max_steps = math.ceil(args.num_train_epochs * (per_epoch or 0))
    num_epochs = math.ceil(max_steps / per_epoch) if per_epoch else 0
    last_epoch_batches = None
    if args.max_steps <= 0 and per_epoch and batches_per_epoch:
        last_epoch_batches = min(
            batches_per_epoch, window * (max_steps - (num_epochs - 1) * per_epoch)
        )
    return TrainingPlan(
        max_steps=max_steps,
        num_epochs=num_epochs,
        batches_per_epoch=batches_per_epoch,
        last_epoch_batches=last_epoch_batches,
        window=window,
        logging_steps=_num_updates(args.logging_steps, max_steps),
        eval_steps=_num_updates(args.eval_steps or args.logging_steps, max_steps),
        save_steps=_num_updates(args.save_steps, max_steps),
    )


def _num_updates(step_setting: float, max_steps: int) -> int:
    """Return a number of updates; a value below 1 is a fraction of the total."""
    if step_setting < 1:
        return math.ceil(step_setting * max_steps)
    return int(step_setting)
