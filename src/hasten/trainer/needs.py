"""Checks of arguments that have no effect without another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from hasten.errors import ContradictionError

if TYPE_CHECKING:
    from hasten.trainer.arguments import TrainingArguments


class _Need(NamedTuple):
    names: tuple[str, ...]
    acts: Callable[[TrainingArguments], bool]
    """Return whether the arguments have an effect in combination with the others."""
    why: str
    remedy: str


_OPTIMIZER: Final = ("optim", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
_SCHEDULE: Final = ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio")
_NEEDS: Final[Sequence[_Need]] = (
    _Need(
        ("adam_beta1", "adam_beta2", "adam_epsilon"),
        lambda args: args.optim.startswith("adam"),
        "only Adam takes it, and optim names another optimizer",
        "remove it, or set optim='adamw_torch'",
    ),
    _Need(
        ("warmup_steps", "warmup_ratio"),
        lambda args: args.lr_scheduler_type != "constant",
        "lr_scheduler_type='constant' has no warm-up",
        "set lr_scheduler_type='constant_with_warmup'",
    ),
    _Need(
        ("gradient_checkpointing_kwargs",),
        lambda args: args.gradient_checkpointing,
        "it needs gradient_checkpointing=True",
        "set gradient_checkpointing=True, or remove it",
    ),
    _Need(
        ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"),
        lambda args: not args.fsdp and not args.deepspeed,
        "fsdp and deepspeed replace DistributedDataParallel, whose option it is",
        "remove it",
    ),
    _Need(
        ("length_column_name",),
        lambda args: args.group_by_length,
        "it is only used with group_by_length=True",
        "set group_by_length=True, or remove it",
    ),
    _Need(
        ("dataloader_prefetch_factor", "dataloader_persistent_workers"),
        lambda args: args.dataloader_num_workers > 0,
        "it is an option of worker processes, and there are none",
        "set dataloader_num_workers above 0, or remove it",
    ),
    _Need(
        ("logging_steps",),
        lambda args: "steps" in (args.logging_strategy, args.eval_strategy if args.eval_steps is None else ""),
        "logging_strategy does not count updates",
        "set logging_strategy='steps', or remove it",
    ),
    _Need(
        ("eval_steps",),
        lambda args: args.eval_strategy == "steps",
        "eval_strategy does not count updates",
        "set eval_strategy='steps', or remove it",
    ),
    _Need(
        ("eval_delay", "metric_for_best_model"),
        lambda args: args.eval_strategy != "no",
        "eval_strategy='no' evaluates nothing during the training",
        "set eval_strategy='steps' or 'epoch', or remove it",
    ),
    _Need(
        ("greater_is_better",),
        lambda args: bool(args.metric_for_best_model) or args.load_best_model_at_end or args.save_strategy == "best",
        "no metric ranks the models",
        "set metric_for_best_model, or remove it",
    ),
    _Need(
        ("save_steps",),
        lambda args: args.save_strategy == "steps",
        "save_strategy does not count updates",
        "set save_strategy='steps', or remove it",
    ),
    _Need(
        ("save_total_limit",),
        lambda args: args.save_strategy != "no",
        "save_strategy='no' writes no checkpoints whose number could be limited",
        "set save_strategy='steps', 'epoch' or 'best', or remove it",
    ),
    _Need(
        ("hub_strategy",),
        lambda args: args.push_to_hub and args.save_strategy != "no",
        "uploads after every save need push_to_hub=True and a save_strategy",
        "set both, or remove it",
    ),
)


def check_needs(args: TrainingArguments) -> None:
    """Raise for arguments that have no effect in combination with the others. Raises: ContradictionError."""
    for names, acts, why, remedy in _NEEDS:
        if (wrong := _given(args, names)) and not acts(args):
            raise ContradictionError(f"{wrong} would have no effect: {why}; {remedy}.")


def check_given_optimizers(args: TrainingArguments, optimizer: object, scheduler: object) -> None:
    """Raise for arguments about an optimizer or scheduler that was passed to the Trainer. Raises: ContradictionError."""
    for made, names, what in ((optimizer, _OPTIMIZER, "an optimizer"), (scheduler, _SCHEDULE, "a scheduler")):
        if made is not None and (wrong := _given(args, names)):
            raise ContradictionError(
                f"{wrong} would have no effect: optimizers=(…) contains {what}, which is used unchanged; set this when you create it, "
                "or remove it from optimizers."
            )


def _given(args: TrainingArguments, names: Sequence[str]) -> str:
    """Return the first of these arguments that differs from its default, as `name=value`; empty for none."""
    defaults: dict[str, Any] = {field.name: field.default for field in fields(args)}  # Any: of every type
    return next((f"{name}={getattr(args, name)!r}" for name in names if getattr(args, name) != defaults[name]), "")
