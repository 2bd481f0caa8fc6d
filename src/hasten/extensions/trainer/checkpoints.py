"""Checkpoints of a Trainer: saving, resuming, the best one, and publishing the model."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hasten.accelerator.components import components
from hasten.checkpoint.store.locate import check_local, join_place, newest, open_store
from hasten.checkpoint.store.occupied import check_no_checkpoint
from hasten.comm.agreement import agree, agreeing
from hasten.config.masking import masked_tree
from hasten.errors import ConfigError, HastenWarning, HubError
from hasten.extensions.trainer.arguments import TrainingArguments
from hasten.extensions.trainer.interface import TrainerInterface


def save(trainer: TrainerInterface, metrics: Mapping[str, float]) -> str:
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
    if trainer.args.push_to_hub and trainer.args.hub_strategy == "every_save":
        trainer.push_to_hub(
            f"Training in progress, step {state.global_step}", blocking=False
        )
    return checkpoint_path


def resume(trainer: TrainerInterface, which: str | bool) -> None:
    """Restore the state of a checkpoint. Ranks: every rank."""
    accelerator, state = trainer.accelerator, trainer.state
    checkpoint_path: str | None = which if isinstance(which, str) else None
    if which == "auto":
        checkpoint_path = None
        if not _any_checkpoint(trainer):
            return
    accelerator.load_state(checkpoint_path)
    trainer.callbacks.restore_states()
    if state.best_metric is not None and state.best_global_step == state.global_step:
        # its path was not known when it was written
        state.best_model_checkpoint = checkpoint_path or _newest(trainer)


def _root(trainer: TrainerInterface) -> str:
    return join_place(trainer.args.output_dir, "checkpoints")


def _newest(trainer: TrainerInterface) -> str:
    return join_place(_root(trainer), newest(open_store(_root(trainer))) or "")


def _any_checkpoint(trainer: TrainerInterface) -> bool:
    """Return whether there is a checkpoint, according to the main process. Ranks: every rank.

    Raises: CheckpointError for checkpoints that cannot be used.
    """
    has_checkpoint = [False]
    with agreeing(trainer.accelerator.ctx.world, "looking for a checkpoint"):
        if trainer.accelerator.is_main_process:
            has_checkpoint = [newest(open_store(_root(trainer))) is not None]
    return bool(trainer.accelerator.broadcast_object_list(has_checkpoint)[0])


def note_best(trainer: TrainerInterface, metrics: Mapping[str, float]) -> bool:
    """Record the metric that ranks models; return whether it is the best so far. Of two equal values the later is better.

    Raises: ConfigError if the evaluation lacks the metric and an argument depends on it.
    """
    args, state = trainer.args, trainer.state
    if args.best_metric not in metrics:
        if args.load_best_model_at_end or args.save_strategy == "best":
            raise ConfigError(
                f"the evaluation returned {', '.join(metrics)}, but not {args.best_metric}, which selects the best model; set "
                "metric_for_best_model to one of them."
            )
        return False
    value = float(metrics[args.best_metric])
    best_so_far = state.best_metric
    if math.isnan(value) or (
        best_so_far is not None
        and (value < best_so_far if args.larger_is_better else value > best_so_far)
    ):
        return False
    state.best_metric, state.best_global_step = value, state.global_step
    return True


def load_best(trainer: TrainerInterface) -> None:
    """Load the weights of the best checkpoint into the model. Ranks: every rank."""
    checkpoint_path = trainer.state.best_model_checkpoint
    if checkpoint_path is not None:
        trainer.accelerator.load_model(trainer.wrapped_model, checkpoint_path)


def save_model(trainer: TrainerInterface, folder: str) -> str:
    """Write weights, configuration, tokenizer and arguments to a folder. Ranks: every rank."""
    with trainer.averaged():
        return _save_model(trainer, folder)


def _save_model(trainer: TrainerInterface, folder: str) -> str:
    accelerator = trainer.accelerator
    model = trainer.model_for_evaluation()
    # Any: models with save_pretrained share no base class here
    inner: Any = accelerator.unwrap_model(model)
    if not hasattr(inner, "save_pretrained"):
        accelerator.save_model(model, folder)
    else:
        weights = accelerator.get_state_dict(model)
        with agree(accelerator.ctx.world, "save_model"):
            if accelerator.is_main_process:
                check_no_checkpoint(check_local(folder, "save_model(output_dir)"))
                inner.save_pretrained(folder, state_dict=weights)
    with agree(accelerator.ctx.world, "save_model: tokenizer and arguments"):
        if accelerator.is_main_process:
            if hasattr(trainer.processing_class, "save_pretrained"):
                trainer.processing_class.save_pretrained(folder)
            text = json.dumps(
                masked_tree(trainer.args.to_dict()), indent=2, default=str
            )
            Path(folder, "training_args.json").write_text(text + "\n", encoding="utf-8")
    return folder


def push_to_hub(
    trainer: TrainerInterface, commit_message: str, blocking: bool, **options: Any
) -> str | None:  # Any: options of the Hub client
    """Save the model with a card of the run and upload it; returns the URL of the commit on the main process, None on the others.

    A background upload sends a copy of the model, which is deleted afterwards; a blocking one sends the output folder.
    Ranks: every rank. Raises: ConfigError without a name for the repository; HubError if a blocking upload fails.
    """
    args, publishing = trainer.args, components(trainer.accelerator).publishing
    target = _repository(trainer)
    finish_upload(trainer)
    folder = args.output_dir if blocking else _staging_folder(trainer)
    save_model(trainer, folder)
    folder_push: Any = None  # Any: a class of another extension
    with agreeing(trainer.accelerator.ctx.world, "push_to_hub"):
        if trainer.accelerator.is_main_process:
            publishing.write_card(Path(folder), _card(trainer, target.repo_id))
            folder_push = publishing.folder_push(
                folder=Path(folder),
                target=target,
                message=commit_message,
                ignore=(
                    "checkpoints/*",
                    "run_log/*",
                    f"{args.run_name or 'trainer'}/*",
                    ".*",
                ),
                temporary=not blocking,
                options=options,
            )
    url: str | None = publishing.push(folder_push, blocking)
    return url


def _repository(trainer: TrainerInterface) -> Any:  # Any: a class of another extension
    args = trainer.args
    name = args.hub_model_id or Path(args.output_dir).name
    if not name:
        raise ConfigError(
            f"output_dir={args.output_dir!r} contains no repository name; set hub_model_id."
        )
    return components(trainer.accelerator).publishing.repository(
        name, args.hub_token, args.hub_private_repo
    )


def check_access(trainer: TrainerInterface) -> None:
    """Create the repository of the uploads, so that a token that is refused is found now. Ranks: every rank. Raises: HubError."""
    target = _repository(trainer)
    with agreeing(trainer.accelerator.ctx.world, "push_to_hub"):
        if trainer.accelerator.is_main_process:
            components(trainer.accelerator).publishing.check_access(target)


def finish_upload(trainer: TrainerInterface) -> None:
    """Wait for the background upload, and warn if it failed: a later push sends a newer model. Ranks: every rank."""
    try:
        components(trainer.accelerator).publishing.wait()
    except HubError as error:
        if trainer.accelerator.is_main_process:
            warnings.warn(
                f"{error} The next push sends the model of that time.",
                HastenWarning,
                stacklevel=2,
            )


def _staging_folder(trainer: TrainerInterface) -> str:
    """Return a new folder for files that must not change while they are uploaded. Ranks: every rank."""
    folders = [""]
    with agreeing(trainer.accelerator.ctx.world, "push_to_hub"):
        if trainer.accelerator.is_main_process:
            folders = [str(components(trainer.accelerator).publishing.staging_folder())]
    return str(trainer.accelerator.broadcast_object_list(folders)[0])


# Any: a class of another extension
def _card(trainer: TrainerInterface, name: str) -> Any:
    """Return the numbers of the run for the model card: final ones, logged ones, and arguments that are not at their default."""
    state, args = trainer.state, trainer.args
    final: dict[str, Any] = {"step": state.global_step, "epoch": state.epoch}
    if state.total_weight:
        final["train_loss"] = state.total_loss / state.total_weight
    for logged in state.log_history:
        final.update(
            {key: value for key, value in logged.items() if key.startswith("eval_")}
        )
    defaults = TrainingArguments(args.output_dir).to_dict()
    chosen = {
        key: value
        for key, value in args.to_dict().items()
        if value != defaults[key] and key != "output_dir"
    }
    inner = trainer.accelerator.unwrap_model(trainer.model_for_evaluation())
    return components(trainer.accelerator).publishing.card(
        name=name,
        library="transformers" if hasattr(inner, "save_pretrained") else None,
        metrics=final,
        history=state.log_history,
        settings=chosen | {"learning_rate": args.learning_rate, "seed": args.seed},
        run=components(trainer.accelerator).publishing.facts(),
    )
