"""Interface of a Trainer for its loop, evaluations, checkpoints and callbacks."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from hasten.accelerator.facade import Accelerator
from hasten.extensions.trainer.arguments import TrainingArguments
from hasten.extensions.trainer.state import TrainerControl, TrainerState


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
    # Any: schedulers, loaders and optimizers of any class, before and after prepare()
    optimizer: Any
    lr_scheduler: Any
    wrapped_model: Any
    train_loader: Any
    processing_class: Any  # Any: a tokenizer or processor
    label_names: list[str]
    shifted: bool

    @property
    def callbacks(self) -> TrainerEvents: ...
    @property
    # Any: a function of an EvalPrediction, or None
    def compute_metrics(self) -> Any: ...
    @property
    def preprocess_logits_for_metrics(self) -> Any: ...  # Any: a function, or None
    def event_keywords(self) -> dict[str, Any]: ...  # Any: keywords of the event
    def model_for_evaluation(self) -> nn.Module: ...
    def training_step(
        self, model: nn.Module, inputs: Any
    ) -> tuple[Tensor, Tensor | None]: ...
    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False
    ) -> Any: ...
    def evaluate(self) -> dict[str, float]: ...
    def log(self, logs: dict[str, Any]) -> None: ...
