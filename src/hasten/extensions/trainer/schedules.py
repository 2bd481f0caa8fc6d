"""Optimizers and learning-rate schedules by the names of transformers, and several of them used as one."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import hasten
from hasten.errors import SettingValueError
from hasten.extensions.trainer.arguments import TrainingArguments

Factor = Callable[..., float]


def _done(step: int, warmup: int, total: int) -> float:
    """Return the fraction of the time after the warm-up that has passed, at most 1."""
    return min(max(step - warmup, 0) / max(total - warmup, 1), 1.0)


def _constant(step: int, warmup: int, total: int) -> float:
    return 1.0


def _linear(step: int, warmup: int, total: int) -> float:
    return 1.0 - _done(step, warmup, total)


def _cosine(step: int, warmup: int, total: int, num_cycles: float = 0.5) -> float:
    return max(
        0.0,
        0.5 * (1.0 + math.cos(2.0 * math.pi * num_cycles * _done(step, warmup, total))),
    )


def _cosine_with_restarts(
    step: int, warmup: int, total: int, num_cycles: int = 1
) -> float:
    done = _done(step, warmup, total)
    return (
        0.0
        if done >= 1.0
        else 0.5 * (1.0 + math.cos(math.pi * ((num_cycles * done) % 1.0)))
    )


def _cosine_with_min_lr(
    step: int, warmup: int, total: int, min_lr_rate: float, num_cycles: float = 0.5
) -> float:
    return min_lr_rate + (1.0 - min_lr_rate) * _cosine(step, warmup, total, num_cycles)


def _polynomial(
    step: int, warmup: int, total: int, power: float = 1.0, end_factor: float = 0.0
) -> float:
    left: float = (1.0 - _done(step, warmup, total)) ** power
    return end_factor + (1.0 - end_factor) * left


def _inverse_sqrt(
    step: int, warmup: int, total: int, timescale: int | None = None
) -> float:
    scale = timescale or warmup or 10_000
    return 1.0 / math.sqrt((step - warmup + scale) / scale)


def _warmup_stable_decay(
    step: int,
    warmup: int,
    total: int,
    num_decay_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> float:
    decay = _cosine(step, total - num_decay_steps, total, num_cycles)
    return min_lr_ratio + (1.0 - min_lr_ratio) * decay


SCHEDULES: Final[Mapping[str, Factor]] = MappingProxyType(
    {
        "linear": _linear,
        "cosine": _cosine,
        "cosine_with_restarts": _cosine_with_restarts,
        "cosine_with_min_lr": _cosine_with_min_lr,
        "polynomial": _polynomial,
        "constant": _constant,
        "constant_with_warmup": _constant,
        "inverse_sqrt": _inverse_sqrt,
        "warmup_stable_decay": _warmup_stable_decay,
    }
)
"""Name -> the factor on the learning rate at a step after the warm-up."""


_RELATIVE: Final = MappingProxyType(
    {
        "lr_end": " end_factor is relative: give lr_end / learning_rate.",
        "min_lr": " min_lr_rate is relative: give min_lr / learning_rate.",
    }
)
"""Advice for options of transformers that are learning rates, where the ones here are fractions of it."""
_EXAMPLES: Final = MappingProxyType({"min_lr_rate": 0.1, "num_decay_steps": 100})


def factor_at(
    step: int,
    shape: Factor,
    warmup: int,
    num_training_steps: int,
    options: Mapping[str, Any],
) -> float:
    """Return the factor on the learning rate: linear during the warm-up, then `shape`."""
    if step < warmup:
        return step / warmup
    return shape(step, warmup, num_training_steps, **options)


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
    options = dict(scheduler_specific_kwargs or {})
    if name not in SCHEDULES:
        raise SettingValueError(
            f"lr_scheduler_type={name!r} is unknown; give one of {', '.join(SCHEDULES)}, or a custom scheduler in "
            "optimizers=(optimizer, scheduler)."
        )
    shape = SCHEDULES[name]
    takes = dict(list(inspect.signature(shape).parameters.items())[3:])
    if wrong := sorted(set(options) - set(takes)):
        raise SettingValueError(
            f"lr_scheduler_kwargs has {', '.join(wrong)}, which the schedule {name!r} does not take; it takes "
            f"{', '.join(takes) or 'no options'}.{_RELATIVE.get(wrong[0], '')}"
        )
    if missing := [
        key
        for key, taken in takes.items()
        if taken.default is taken.empty and key not in options
    ]:
        raise SettingValueError(
            f"lr_scheduler_type={name!r} has no default for {missing[0]}; give it, as in lr_scheduler_kwargs={{{missing[0]!r}: "
            f"{_EXAMPLES[missing[0]]}}}."
        )
    warmup = 0 if name == "constant" else num_warmup_steps
    lr_lambda = partial(
        factor_at,
        shape=shape,
        warmup=warmup,
        num_training_steps=num_training_steps,
        options=options,
    )
    return LambdaLR(optimizer, lr_lambda)


def num_warmup_steps(args: TrainingArguments, max_steps: int) -> int:
    """Return the number of warm-up updates: as given, or a fraction of the training if below 1."""
    if 0 < args.warmup_steps < 1:
        return math.ceil(args.warmup_steps * max_steps)
    return int(args.warmup_steps) or math.ceil(args.warmup_ratio * max_steps)


class OptimizerList:
    """Optimizers of one model that are stepped together; `param_groups` holds the groups of all of them."""

    # Any: before and after prepare()
    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, in their order."""
        return [
            group for optimizer in self.optimizers for group in optimizer.param_groups
        ]

    @property
    def state(self) -> dict[Any, Any]:
        """The states of all parameters."""
        return {
            key: value
            for optimizer in self.optimizers
            for key, value in optimizer.state.items()
        }

    def step(self) -> None:
        """Step every optimizer."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Clear the gradients of every optimizer's parameters."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class SchedulerList:
    """Schedules of several optimizers that are stepped together."""

    # Any: before and after prepare()
    def __init__(self, schedulers: Sequence[Any]) -> None:
        self.schedulers = list(schedulers)

    def step(self) -> None:
        """Step every schedule."""
        for scheduler in self.schedulers:
            scheduler.step()

    def get_last_lr(self) -> list[float]:
        """Return the learning rates of all parameter groups, in the order of `OptimizerList.param_groups`."""
        return [
            rate for scheduler in self.schedulers for rate in scheduler.get_last_lr()
        ]


def members_of(value: Any) -> list[Any]:  # Any: an optimizer, a scheduler, or several
    """Return the optimizers or schedulers to prepare: those of a list, or the one itself."""
    match value:
        case OptimizerList():
            return value.optimizers
        case SchedulerList():
            return value.schedulers
        case _:
            return [value]


# Any: one optimizer or several
def make_schedulers(optimizer: Any, make: Callable[[Optimizer], LRScheduler]) -> Any:
    """Return the schedule of an optimizer, or a `SchedulerList` for an `OptimizerList`."""
    schedulers = [make(member) for member in members_of(optimizer)]
    return (
        SchedulerList(schedulers)
        if isinstance(optimizer, OptimizerList)
        else schedulers[0]
    )


def make_optimizer(
    args: TrainingArguments, model: nn.Module
) -> Optimizer | OptimizerList:
    """Return the optimizer named by `optim`; biases, norms and other vectors have no weight decay.

    `optim="muon"` returns AdamW and Muon as an `OptimizerList`: AdamW first, so that the first learning rate is `learning_rate`.

    Raises: SettingValueError for a name without an optimizer.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {
            "params": [p for p in trained if p.ndim >= 2],
            "weight_decay": args.weight_decay,
        },
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    adam = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }
    makers: dict[str, Callable[[], Optimizer | OptimizerList]] = {
        "adamw_torch": lambda: torch.optim.AdamW(groups, **adam),  # type: ignore[arg-type]
        "adamw_torch_fused": lambda: torch.optim.AdamW(groups, fused=True, **adam),  # type: ignore[arg-type]
        "sgd": lambda: torch.optim.SGD(groups, lr=args.learning_rate),
        "adagrad": lambda: torch.optim.Adagrad(groups, lr=args.learning_rate),
        "rmsprop": lambda: torch.optim.RMSprop(groups, lr=args.learning_rate),
        "muon": lambda: _muon(args, model),
    }
    if args.optim not in makers:
        raise SettingValueError(
            f"optim={args.optim!r} is unknown; give one of {', '.join(makers)}, or a custom optimizer in optimizers=(optimizer, scheduler)."
        )
    return makers[args.optim]()


def _muon(args: TrainingArguments, model: nn.Module) -> OptimizerList:
    split = hasten.optimizers(
        model,
        "muon",
        lr=args.muon_learning_rate,
        adamw_lr=args.learning_rate,
        weight_decay=args.weight_decay,
        betas=(args.adam_beta1, args.adam_beta2),
    )
    return OptimizerList(split[::-1])
