"""Progress of a training (TrainerState), requests of callbacks (TrainerControl), and the interface of a Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

from torch import Tensor, nn

from hasten.accelerator.facade import Accelerator
from hasten.trainer.arguments import TrainingArguments


@dataclass
class TrainerState:
    """Progress of the training; equal on every rank, saved with every checkpoint."""

    epoch: float = 0.0
    global_step: int = 0
    max_steps: int = 0
    num_train_epochs: int = 0
    epochs_done: int = 0
    batches_in_epoch: int = 0
    loss_sum: float = 0.0
    """Loss times weight since the last log, over all ranks, as far as it has been reduced."""
    loss_weight: float = 0.0
    total_loss: float = 0.0
    """The same since the start of the training."""
    total_weight: float = 0.0
    best_metric: float | None = None
    best_model_checkpoint: str | None = None
    best_global_step: int = 0
    evaluation_due: bool = False
    """True if an evaluation was due when the training was interrupted by a signal."""
    log_history: list[dict[str, Any]] = field(default_factory=list)  # Any: numbers and strings
    callbacks: dict[str, Any] = field(default_factory=dict)  # Any: each callback's JSON
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: everything but the ranks of this process."""
        values = asdict(self)
        del values["is_world_process_zero"], values["is_local_process_zero"]
        return values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        known = {item.name for item in fields(self)}
        for name, value in state.items():
            if name in known:
                setattr(self, name, value)


@dataclass
class TrainerControl:
    """Requests of callbacks, on which the loop acts after the event. Ranks: set to the same values on every rank."""

    should_training_stop: bool = False
    stop_reason: str = ""
    """Reason of the stop, for the last line of output."""
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False


class TrainerEvents(Protocol):
    """Protocol of a Trainer's callbacks."""

    def call(self, event: str, **kwargs: Any) -> None:  # Any: keywords of the event
        """Call an event of every callback that overrides it."""
        ...

    def keep_states(self) -> None:
        """Store the states of callbacks that have one in the TrainerState."""
        ...

    def restore_states(self) -> None:
        """Restore the callbacks' states after a checkpoint was loaded."""
        ...


class TrainerInterface(Protocol):
    """Protocol of the Trainer for its loop, its evaluations, its checkpoints and its callbacks."""

    args: TrainingArguments
    state: TrainerState
    control: TrainerControl
    accelerator: Accelerator
    optimizer: Any  # Any: schedulers, loaders and optimizers of any class, before and after prepare()
    lr_scheduler: Any
    wrapped_model: Any
    train_loader: Any
    processing_class: Any  # Any: a tokenizer or processor
    label_names: list[str]
    shifted: bool

    @property
    def callbacks(self) -> TrainerEvents: ...
    @property
    def compute_metrics(self) -> Any: ...  # Any: a function of an EvalPrediction, or None
    @property
    def preprocess_logits_for_metrics(self) -> Any: ...  # Any: a function, or None
    def event_keywords(self) -> dict[str, Any]: ...  # Any: keywords of the event
    def averaged(self) -> AbstractContextManager[Any]: ...  # Any: of no use to the block
    def model_for_evaluation(self) -> nn.Module: ...
    def training_step(self, model: nn.Module, inputs: Any) -> tuple[Tensor, Tensor | None]: ...
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False) -> Any: ...
    def evaluate(self) -> dict[str, float]: ...
    def note_best(self, metrics: Mapping[str, float]) -> bool: ...
    def log(self, logs: dict[str, Any]) -> None: ...
    def save_checkpoint(self, metrics: Mapping[str, float] | None = None) -> str: ...
    def load_best(self) -> None: ...
    def push_to_hub(self, commit_message: str = ...) -> str | None: ...
