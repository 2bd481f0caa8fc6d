"""TrainingArguments: the settings of a Trainer under the names of transformers; each has an effect or is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from hasten.errors import (
    ContradictionError,
    SettingValueError,
    UnknownSettingError,
)

When = Literal["no", "steps", "epoch"]
_CHOICES: Final = MappingProxyType(
    {
        "logging_strategy": ("no", "steps", "epoch"),
        "eval_strategy": ("no", "steps", "epoch"),
        "save_strategy": ("no", "steps", "epoch", "best"),
    }
)
_AT_LEAST: Final = MappingProxyType(
    {
        "num_train_epochs": 0,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "learning_rate": 0,
        "weight_decay": 0,
        "adam_epsilon": 0,
        "max_grad_norm": 0,
        "warmup_steps": 0,
        "warmup_ratio": 0,
        "dataloader_num_workers": 0,
        "seed": 0,
    }
)


@dataclass(frozen=True)
class TrainingArguments:
    """Settings of a `Trainer`. Arguments left at their default may be set by flags, environment or a settings file.

    Raises: a subclass of ConfigError for an unknown name, a value out of range or contradictory settings.
    """

    output_dir: str
    # -- duration and batch sizes
    num_train_epochs: float = 3.0
    max_steps: int = -1
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    # -- optimizer and schedule
    optim: str = "adamw_torch"
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: Mapping[str, Any] | None = None
    warmup_steps: float = 0
    warmup_ratio: float = 0.0
    # -- precision, memory and distribution
    bf16: bool = False
    fp16: bool = False
    gradient_checkpointing: bool = False
    torch_compile: bool = False
    torch_compile_backend: str | None = None
    torch_compile_mode: str | None = None
    use_cpu: bool = False
    fsdp: bool | str | list[str] = ""
    fsdp_config: Mapping[str, Any] | None = None
    deepspeed: str | Mapping[str, Any] | None = None
    ddp_find_unused_parameters: bool | None = None
    # -- randomness and data
    seed: int = 42
    data_seed: int | None = None
    full_determinism: bool = False
    dataloader_num_workers: int = 0
    dataloader_pin_memory: bool | None = None
    dataloader_persistent_workers: bool = False
    dataloader_prefetch_factor: int | None = None
    dataloader_drop_last: bool = False
    remove_unused_columns: bool = True
    label_names: list[str] | None = None
    # -- when to log, evaluate and save
    logging_strategy: When = "steps"
    logging_steps: float = 500
    logging_first_step: bool = False
    logging_dir: str | None = None
    disable_tqdm: bool = False
    report_to: str | list[str] | None = "none"
    run_name: str | None = None
    eval_strategy: When = "no"
    eval_steps: float | None = None
    save_strategy: Literal["no", "steps", "epoch", "best"] = "steps"
    save_steps: float = 500
    save_total_limit: int | None = None
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    resume_from_checkpoint: str | bool | None = None

    # Any: the arguments of __init__
    def __new__(cls, *args: Any, **settings: Any) -> TrainingArguments:
        """Check that every name is known, and return an empty object."""
        setting_names = [field.name for field in fields(cls)]
        for name in settings:
            if name not in setting_names:
                similar_names = get_close_matches(name, setting_names, n=1, cutoff=0.6)
                if similar_names:
                    hint = f"did you mean {similar_names[0]!r}?"
                else:
                    hint = "the names are listed in docs/trainer.md."
                raise UnknownSettingError(
                    f"TrainingArguments has no setting {name!r}, so it would have no effect; {hint}"
                )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if (setting_value := getattr(self, name)) not in choices:
                raise SettingValueError(
                    f"{name}={setting_value!r} is not a known value; give one of {', '.join(choices)}."
                )
        for name, smallest_value in _AT_LEAST.items():
            if (
                not (setting_value := getattr(self, name)) >= smallest_value
            ):  # nan is refused too
                raise SettingValueError(
                    f"{name}={setting_value!r} is below {smallest_value}; give a number from {smallest_value} up."
                )
        if self.warmup_ratio > 1:
            raise SettingValueError(
                f"warmup_ratio={self.warmup_ratio!r} is above 1, but it is a fraction; give a number from 0 to 1."
            )
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= (setting_value := getattr(self, name)) < 1:
                raise SettingValueError(
                    f"{name}={setting_value!r} is outside [0, 1): an average keeps this fraction of itself at every update; give a number such as 0.9."
                )
        for name in ("logging_steps", "eval_steps", "save_steps"):
            setting_value = getattr(self, name)
            if setting_value is not None and not setting_value > 0:
                raise SettingValueError(
                    f"{name}={setting_value!r} is not a number of updates; give one from 1 up, or a fraction of the training between 0 and 1."
                )
        self._check_length()
        self._check_pairs()

    def _check_length(self) -> None:
        if self.max_steps == 0 or (self.max_steps < 0 and self.num_train_epochs == 0):
            raise SettingValueError(
                "max_steps and num_train_epochs leave nothing to train; set one of them above zero."
            )
        if self.save_total_limit is not None and self.save_total_limit < 1:
            raise SettingValueError(
                f"save_total_limit={self.save_total_limit} would keep no checkpoint; set save_strategy='no' instead."
            )

    def _check_pairs(self) -> None:
        if self.bf16 and self.fp16:
            raise ContradictionError(
                "bf16=True and fp16=True ask for two precisions at once; set one of them."
            )
        if self.warmup_steps and self.warmup_ratio:
            raise ContradictionError(
                "warmup_steps and warmup_ratio both set the warm-up; remove one of them."
            )
        if self.load_best_model_at_end or self.save_strategy == "best":
            self._check_best()
        if self.deepspeed and self.fsdp:
            raise ContradictionError(
                "deepspeed and fsdp exclude each other; remove one of them."
            )
        check_needs(self)

    def _check_best(self) -> None:
        if self.load_best_model_at_end:
            setting_words = "load_best_model_at_end=True"
        else:
            setting_words = "save_strategy='best'"
        if self.eval_strategy == "no":
            raise ContradictionError(
                f"{setting_words} needs evaluations to find the best model; set eval_strategy."
            )
        if self.save_strategy in ("best", self.eval_strategy):
            steps = self.eval_steps or self.logging_steps
            are_whole = steps >= 1 and self.save_steps >= 1
            if are_whole:
                are_multiples = self.save_steps % steps == 0
            else:
                are_multiples = self.save_steps == steps
            if self.save_strategy != "steps" or are_multiples:
                return
        raise ContradictionError(
            f"{setting_words} needs a checkpoint of each model that may be the best, but eval_strategy={self.eval_strategy!r} "
            f"and save_strategy={self.save_strategy!r} do not match; give both the same strategy, with save_steps a "
            "multiple of eval_steps, or set save_strategy='best'."
        )

    @property
    def best_metric(self) -> str:
        """The metric that ranks models, with its prefix: `eval_loss` unless another is named."""
        name = self.metric_for_best_model or "loss"
        return name if name.startswith("eval_") else f"eval_{name}"

    @property
    def larger_is_better(self) -> bool:
        """True if a larger metric is better: `greater_is_better`, or by default unless the name ends in `loss`."""
        if self.greater_is_better is None:
            return not self.best_metric.endswith("loss")
        return self.greater_is_better

    @property
    def trackers(self) -> list[str]:
        """The names in `report_to`, without `none`."""
        if isinstance(self.report_to, str):
            tracker_names = [self.report_to]
        else:
            tracker_names = list(self.report_to or [])
        return [name for name in tracker_names if name != "none"]

    def to_dict(self) -> dict[str, Any]:  # Any: JSON values
        """Return the settings as JSON values."""
        return asdict(self)


class _Need(NamedTuple):
    names: tuple[str, ...]
    acts: Callable[[TrainingArguments], bool]
    """Return whether the arguments have an effect in combination with the others."""
    why: str
    remedy: str


_OPTIMIZER: Final = (
    "optim",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
)
_SCHEDULE: Final = (
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "warmup_ratio",
)
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
        ("ddp_find_unused_parameters",),
        lambda args: not args.fsdp and not args.deepspeed,
        "fsdp and deepspeed replace DistributedDataParallel, whose option it is",
        "remove it",
    ),
    _Need(
        ("dataloader_prefetch_factor", "dataloader_persistent_workers"),
        lambda args: args.dataloader_num_workers > 0,
        "it is an option of worker processes, and there are none",
        "set dataloader_num_workers above 0, or remove it",
    ),
    _Need(
        ("logging_steps",),
        lambda args: (
            "steps"
            in (
                args.logging_strategy,
                args.eval_strategy if args.eval_steps is None else "",
            )
        ),
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
        ("metric_for_best_model",),
        lambda args: args.eval_strategy != "no",
        "eval_strategy='no' evaluates nothing during the training",
        "set eval_strategy='steps' or 'epoch', or remove it",
    ),
    _Need(
        ("greater_is_better",),
        lambda args: (
            bool(args.metric_for_best_model)
            or args.load_best_model_at_end
            or args.save_strategy == "best"
        ),
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
)


def check_needs(args: TrainingArguments) -> None:
    """Raise for arguments that have no effect in combination with the others. Raises: ContradictionError."""
    for setting_names, has_effect, why, remedy in _NEEDS:
        wrong_setting = _first_changed(args, setting_names)
        if wrong_setting and not has_effect(args):
            raise ContradictionError(
                f"{wrong_setting} would have no effect: {why}; {remedy}."
            )


def check_given_optimizers(
    args: TrainingArguments, optimizer: object, scheduler: object
) -> None:
    """Raise for arguments about an optimizer or scheduler that was passed to the Trainer. Raises: ContradictionError."""
    for passed_object, setting_names, object_words in (
        (optimizer, _OPTIMIZER, "an optimizer"),
        (scheduler, _SCHEDULE, "a scheduler"),
    ):
        wrong_setting = _first_changed(args, setting_names)
        if passed_object is not None and wrong_setting:
            raise ContradictionError(
                f"{wrong_setting} would have no effect: optimizers=(…) contains {object_words}, which is used unchanged; set this when you create it, "
                "or remove it from optimizers."
            )


def _first_changed(args: TrainingArguments, setting_names: Sequence[str]) -> str:
    """Return the first of these arguments that differs from its default, as `name=value`; empty for none."""
    # Any: of every type
    defaults: dict[str, Any] = {field.name: field.default for field in fields(args)}
    return next(
        (
            f"{name}={getattr(args, name)!r}"
            for name in setting_names
            if getattr(args, name) != defaults[name]
        ),
        "",
    )
