"""Checkpoints of a Trainer: saving, resuming, and the best one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hasten.checkpoint.store.local_store import check_local, join_location, open_store
from hasten.checkpoint.store.occupied import check_no_checkpoint
from hasten.comm.agreement import agree, agreeing
from hasten.config.masking import masked_tree
from hasten.errors import ConfigError
from hasten.extensions.trainer.interface import TrainerInterface
from hasten.state.load_source import find_newest


def save_checkpoint(trainer: TrainerInterface, metrics: Mapping[str, float]) -> str:
    """Save the whole state and return its path. Ranks: every rank."""
    state = trainer.state
    trainer.callbacks.keep_states()
    checkpoint_path = trainer.accelerator.save_state(metrics=metrics)
    if (
        state.best_metric is not None
        and state.best_global_step == state.global_step
        and metrics
    ):
        state.best_model_checkpoint = checkpoint_path
    trainer.callbacks.call("on_save", checkpoint=checkpoint_path)
    return checkpoint_path


def load_checkpoint(trainer: TrainerInterface, checkpoint: str | bool) -> None:
    """Restore the state of a checkpoint. Ranks: every rank."""
    accelerator = trainer.accelerator
    state = trainer.state
    checkpoint_path: str | None = checkpoint if isinstance(checkpoint, str) else None
    if checkpoint == "auto":
        checkpoint_path = None
        if not _any_checkpoint(trainer):
            return
    accelerator.load_state(checkpoint_path)
    trainer.callbacks.restore_states()
    if state.best_metric is not None and state.best_global_step == state.global_step:
        # its path was not known when it was written
        state.best_model_checkpoint = checkpoint_path or _newest_checkpoint(trainer)


def _checkpoint_root(trainer: TrainerInterface) -> str:
    return join_location(trainer.args.output_dir, "checkpoints")


def _newest_checkpoint(trainer: TrainerInterface) -> str:
    return join_location(
        _checkpoint_root(trainer),
        find_newest(open_store(_checkpoint_root(trainer))) or "",
    )


def _any_checkpoint(trainer: TrainerInterface) -> bool:
    """Return whether there is a checkpoint, according to the main process. Ranks: every rank.

    Raises: CheckpointError for checkpoints that cannot be used.
    """
    has_checkpoint = [False]
    with agreeing(trainer.accelerator.ctx.world, "looking for a checkpoint"):
        if trainer.accelerator.is_main_process:
            has_checkpoint = [
                find_newest(open_store(_checkpoint_root(trainer))) is not None
            ]
    return bool(trainer.accelerator.broadcast_object_list(has_checkpoint)[0])


def note_best(trainer: TrainerInterface, metrics: Mapping[str, float]) -> bool:
    """Record the metric that ranks models; return whether it is the best so far. Of two equal values the later is better.

    Raises: ConfigError if the evaluation lacks the metric and an argument depends on it.
    """
    args = trainer.args
    state = trainer.state
    if args.best_metric not in metrics:
        if args.load_best_model_at_end or args.save_strategy == "best":
            raise ConfigError(
                f"the evaluation returned {', '.join(metrics)}, but not {args.best_metric}, which selects the best model; set "
                "metric_for_best_model to one of them."
            )
        return False
    metric_value = float(metrics[args.best_metric])
    best_so_far = state.best_metric
    direction = 1 if args.larger_is_better else -1
    is_worse = best_so_far is not None and direction * (metric_value - best_so_far) < 0
    if is_worse or math.isnan(metric_value):
        return False
    state.best_metric = metric_value
    state.best_global_step = state.global_step
    return True


def load_best(trainer: TrainerInterface) -> None:
    """Load the weights of the best checkpoint into the model. Ranks: every rank."""
    checkpoint_path = trainer.state.best_model_checkpoint
    if checkpoint_path is not None:
        trainer.accelerator.load_model(trainer.wrapped_model, checkpoint_path)


def save_model(trainer: TrainerInterface, model_folder: str) -> str:
    """Write weights, configuration, tokenizer and arguments to a folder. Ranks: every rank."""
    accelerator = trainer.accelerator
    model = trainer.model_for_evaluation()
    # Any: models with save_pretrained share no base class here
    unwrapped_model: Any = accelerator.unwrap_model(model)
    if not hasattr(unwrapped_model, "save_pretrained"):
        accelerator.save_model(model, model_folder)
    else:
        weights = accelerator.get_state_dict(model)
        with agree(accelerator.ctx.world, "save_model"):
            if accelerator.is_main_process:
                check_no_checkpoint(check_local(model_folder, "save_model(output_dir)"))
                unwrapped_model.save_pretrained(model_folder, state_dict=weights)
    with agree(accelerator.ctx.world, "save_model: tokenizer and arguments"):
        if accelerator.is_main_process:
            if hasattr(trainer.processing_class, "save_pretrained"):
                trainer.processing_class.save_pretrained(model_folder)
            text = json.dumps(
                masked_tree(trainer.args.to_dict()), indent=2, default=str
            )
            Path(model_folder, "training_args.json").write_text(
                text + "\n", encoding="utf-8"
            )
    return model_folder
