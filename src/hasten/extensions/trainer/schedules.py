"""Optimizers and learning-rate schedules by the names of transformers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hasten.errors import SettingValueError
from hasten.extensions.trainer.arguments import TrainingArguments

Factor = Callable[..., float]


def _decay_progress(step: int, warmup: int, total: int) -> float:
    """Return the fraction of the time after the warm-up that has passed, at most 1."""
    return min(max(step - warmup, 0) / max(total - warmup, 1), 1.0)


def _constant_factor(step: int, warmup: int, total: int) -> float:
    return 1.0


def _linear_factor(step: int, warmup: int, total: int) -> float:
    return 1.0 - _decay_progress(step, warmup, total)


def _cosine_factor(
    step: int, warmup: int, total: int, num_cycles: float = 0.5
) -> float:
    return max(
        0.0,
        0.5
        * (
            1.0
            + math.cos(
                2.0 * math.pi * num_cycles * _decay_progress(step, warmup, total)
            )
        ),
    )


def _cosine_with_min_lr_factor(
    step: int, warmup: int, total: int, min_lr_rate: float, num_cycles: float = 0.5
) -> float:
    return min_lr_rate + (1.0 - min_lr_rate) * _cosine_factor(
        step, warmup, total, num_cycles
    )


def _warmup_stable_decay_factor(
    step: int,
    warmup: int,
    total: int,
    num_decay_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> float:
    decay_factor = _cosine_factor(step, total - num_decay_steps, total, num_cycles)
    return min_lr_ratio + (1.0 - min_lr_ratio) * decay_factor


SCHEDULES: Final[Mapping[str, Factor]] = MappingProxyType(
    {
        "linear": _linear_factor,
        "cosine": _cosine_factor,
        "cosine_with_min_lr": _cosine_with_min_lr_factor,
        "constant": _constant_factor,
        "constant_with_warmup": _constant_factor,
        "warmup_stable_decay": _warmup_stable_decay_factor,
    }
)
"""Name -> the factor on the learning rate at a step after the warm-up."""


def factor_at(
    step: int,
    shape: Factor,
    warmup: int,
    num_training_steps: int,
    schedule_options: Mapping[str, Any],
) -> float:
    """Return the factor on the learning rate: linear during the warm-up, then `shape`."""
    if step < warmup:
        return step / warmup
    return shape(step, warmup, num_training_steps, **schedule_options)


def get_scheduler(
    name: str,
    optimizer: Optimizer,
    num_warmup_steps: int = 0,
    num_training_steps: int = 0,
    scheduler_specific_kwargs: Mapping[str, Any] | None = None,
) -> LambdaLR:
    """Return the schedule of this name for the optimizer, over `num_training_steps` updates.

    Raises: SettingValueError for an unknown name or option.
    """
    schedule_options = dict(scheduler_specific_kwargs or {})
    if name not in SCHEDULES:
        raise SettingValueError(
            f"lr_scheduler_type={name!r} is unknown; give one of {', '.join(SCHEDULES)}, or a custom scheduler in "
            "optimizers=(optimizer, scheduler)."
        )
    shape = SCHEDULES[name]
    try:
        shape(0, 0, 1, **schedule_options)
    except TypeError as error:
        option_names = list(inspect.signature(shape).parameters)[3:]
        raise SettingValueError(
            f"lr_scheduler_kwargs={schedule_options!r} are not the options of the schedule {name!r}: {error}. Its options are "
            f"{', '.join(option_names) or 'none'}; rates and ratios are fractions of learning_rate."
        ) from None
    warmup = 0 if name == "constant" else num_warmup_steps
    lr_lambda = partial(
        factor_at,
        shape=shape,
        warmup=warmup,
        num_training_steps=num_training_steps,
        schedule_options=schedule_options,
    )
    return LambdaLR(optimizer, lr_lambda)


def num_warmup_steps(args: TrainingArguments, max_steps: int) -> int:
    """Return the number of warm-up updates: as given, or a fraction of the training if below 1."""
    if 0 < args.warmup_steps < 1:
        return math.ceil(args.warmup_steps * max_steps)
    return int(args.warmup_steps) or math.ceil(args.warmup_ratio * max_steps)


def make_optimizer(args: TrainingArguments, model: nn.Module) -> Optimizer:
    """Return the optimizer named by `optim`; biases, norms and other vectors have no weight decay.

    Raises: SettingValueError for a name without an optimizer.
    """
    decayed_parameters = []
    free_parameters = []
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.ndim >= 2:
            decayed_parameters.append(parameter)
        elif parameter.requires_grad:
            free_parameters.append(parameter)
    param_groups = [
        {"params": decayed_parameters, "weight_decay": args.weight_decay},
        {"params": free_parameters, "weight_decay": 0.0},
    ]
    param_groups = [group for group in param_groups if group["params"]]
    # Any: numbers and pairs
    adam_options: dict[str, Any] = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }
    optimizer_makers: dict[str, Callable[[], Optimizer]] = {
        "adamw_torch": lambda: torch.optim.AdamW(param_groups, **adam_options),
        "adamw_torch_fused": lambda: torch.optim.AdamW(
            param_groups, fused=True, **adam_options
        ),
        "sgd": lambda: torch.optim.SGD(param_groups, lr=args.learning_rate),
    }
    if args.optim not in optimizer_makers:
        raise SettingValueError(
            f"optim={args.optim!r} is unknown; give one of {', '.join(optimizer_makers)}, or a custom optimizer in optimizers=(optimizer, scheduler)."
        )
    return optimizer_makers[args.optim]()
