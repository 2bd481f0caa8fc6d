"""Checkpoints of a Trainer: saving, going on from one, and the best of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hasten.checkpoint.store.locate import join_place, newest, open_store
from hasten.errors import ConfigError, IncompleteCheckpointError

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer


def save(trainer: Trainer, metrics: Mapping[str, float]) -> str:
    """Save the whole state; where it lies. Ranks: every rank."""
    state = trainer.state
    trainer.callbacks.keep_states()
    place = trainer.accelerator.save_state(metrics=metrics)
    if state.best_metric is not None and state.best_global_step == state.global_step and metrics:
        state.best_model_checkpoint = place
    trainer.callbacks.call("on_save", checkpoint=place)
    if trainer.args.push_to_hub and trainer.args.hub_strategy == "every_save":
        trainer.push_to_hub(f"Training in progress, step {state.global_step}")
    return place


def resume(trainer: Trainer, which: str | bool) -> None:
    """Put everything back to where a checkpoint was saved. Ranks: every rank."""
    accelerator, state = trainer.accelerator, trainer.state
    place: str | None = which if isinstance(which, str) else None
    if which == "auto":
        place = None
        if not _any_checkpoint(trainer):
            return
    accelerator.load_state(place)
    trainer.callbacks.restore_states()
    if state.best_metric is not None and state.best_global_step == state.global_step:
        state.best_model_checkpoint = place or _newest(trainer)  # it did not know its own place when it was written


def _root(trainer: Trainer) -> str:
    return join_place(trainer.args.output_dir, "checkpoints")


def _newest(trainer: Trainer) -> str:
    return join_place(_root(trainer), newest(open_store(_root(trainer))))


def _any_checkpoint(trainer: Trainer) -> bool:
    """Whether there is a complete checkpoint, as the main process sees it. Ranks: every rank."""
    found = [False]
    if trainer.accelerator.is_main_process:
        try:
            found = [bool(_newest(trainer))]
        except IncompleteCheckpointError:
            found = [False]
    return bool(trainer.accelerator.broadcast_object_list(found)[0])


def note_best(trainer: Trainer, metrics: Mapping[str, float]) -> bool:
    """Note the metric that ranks models; whether it is the best so far. Of two equal ones the later is better.

    Raises: ConfigError when the evaluation did not give it and something depends on it.
    """
    args, state = trainer.args, trainer.state
    if args.best_metric not in metrics:
        if args.load_best_model_at_end or args.save_strategy == "best":
            raise ConfigError(
                f"the evaluation gave {', '.join(metrics)}, but not {args.best_metric}, by which the best model is to be found; "
                "set metric_for_best_model to one of them."
            )
        return False
    value = float(metrics[args.best_metric])
    known = state.best_metric
    if math.isnan(value) or (known is not None and (value < known if args.larger_is_better else value > known)):
        return False
    state.best_metric, state.best_global_step = value, state.global_step
    return True


def load_best(trainer: Trainer) -> None:
    """Load the weights of the best checkpoint into the model. Ranks: every rank."""
    place = trainer.state.best_model_checkpoint
    if place is not None:
        trainer.accelerator.load_model(trainer.wrapped_model, place)
