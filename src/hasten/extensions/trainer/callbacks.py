"""Callbacks: the events of a training, and the callbacks included in hasten."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from hasten.errors import ArgumentError, ConfigError
from hasten.extensions.trainer.arguments import TrainingArguments
from hasten.extensions.trainer.interface import TrainerInterface
from hasten.extensions.trainer.state import TrainerControl, TrainerState
from hasten.progress.text import value_text

_TIMES: Final = ("_runtime", "_per_second")
EVENTS: Final = (
    "on_init_end",
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_step_end",
    "on_evaluate",
    "on_predict",
    "on_prediction_step",
    "on_save",
    "on_log",
)


class TrainerCallback:
    """Base class of callbacks: override the events you need; each gets the arguments, the state and the control.

    Keywords of an event: `model`, `optimizer`, `lr_scheduler`, `train_dataloader`, `processing_class`, and `metrics` or `logs` for
    events that have them. A callback with `state_dict` and `load_state_dict` is saved with every checkpoint.
    Ranks: every event is called on every rank; a callback must set the same values in the control on every rank.
    """

    # Any below: keywords of the event
    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Handle the end of the Trainer's construction."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Handle the start of the training, or its continuation from a checkpoint."""

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Handle the end of the training, after loading the best model if requested."""

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Handle the start of an epoch, or its continuation after a resume."""

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Handle the end of an epoch, after its last batch."""

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Handle the first batch of an update."""

    def on_substep_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Handle the end of a batch inside an accumulation window."""

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Handle complete and clipped gradients, before the optimizer's step."""

    def on_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Handle the optimizer's step; gradients are still available."""

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Handle the end of an update."""

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Handle the end of an evaluation; `metrics` holds its results."""

    def on_predict(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Handle the end of a prediction; `metrics` holds its results."""

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Handle the end of a batch of an evaluation or prediction."""

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Handle a complete checkpoint; `checkpoint` is its path."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Handle logged values; `logs` holds them."""


class CallbackList:
    """Callbacks of a Trainer, indexed by the events they override, so that an event without callbacks costs one lookup."""

    # Any: callbacks or their classes
    def __init__(self, trainer: TrainerInterface, callbacks: Sequence[Any]) -> None:
        self._trainer = trainer
        self.callbacks: list[TrainerCallback] = []
        self._listeners: dict[str, list[Any]] = {event: [] for event in EVENTS}
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: Any) -> None:  # Any: a callback or its class
        """Add a callback, given as an object or as its class. Raises: ArgumentError for anything else."""
        callback_object = callback() if isinstance(callback, type) else callback
        if not isinstance(callback_object, TrainerCallback):
            raise ArgumentError(
                f"a callback of type {type(callback_object).__qualname__} was given, whose events would never be called; derive it from "
                "hasten.TrainerCallback."
            )
        self.callbacks.append(callback_object)
        self._find_listeners()

    def _find_listeners(self) -> None:
        for event in EVENTS:
            base_method = getattr(TrainerCallback, event)
            listeners = []
            for callback in self.callbacks:
                if getattr(type(callback), event) is not base_method:
                    listeners.append(getattr(callback, event))
            self._listeners[event] = listeners

    def call(self, event: str, **kwargs: Any) -> None:  # Any: keywords of the event
        """Call an event of every callback that overrides it, in the order they were added."""
        listeners = self._listeners[event]
        if not listeners:
            return
        trainer = self._trainer
        for listener in listeners:
            listener(
                trainer.args,
                trainer.state,
                trainer.control,
                **trainer.event_keywords(),
                **kwargs,
            )

    def keep_states(self) -> None:
        """Store the states of callbacks that have one in the TrainerState."""
        for number, callback in enumerate(self.callbacks):
            if hasattr(callback, "state_dict"):
                self._trainer.state.callbacks[f"{number}.{type(callback).__name__}"] = (
                    callback.state_dict()
                )

    def restore_states(self) -> None:
        """Restore the callbacks' states after a checkpoint was loaded."""
        for number, callback in enumerate(self.callbacks):
            saved_state = self._trainer.state.callbacks.get(
                f"{number}.{type(callback).__name__}"
            )
            if saved_state is not None and hasattr(callback, "load_state_dict"):
                callback.load_state_dict(saved_state)


class EarlyStoppingCallback(TrainerCallback):
    """Callback that stops the training after several evaluations without an improvement of `metric_for_best_model`."""

    def __init__(
        self, early_stopping_patience: int = 1, early_stopping_threshold: float = 0.0
    ) -> None:
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self._best = math.nan
        self._waited = 0

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Raise unless there are evaluations to watch."""
        if args.eval_strategy == "no":
            raise ConfigError(
                "EarlyStoppingCallback would never stop the training without evaluations; set eval_strategy."
            )

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Count evaluations without improvement."""
        metrics = kwargs["metrics"]
        if args.best_metric not in metrics:
            raise ConfigError(
                f"EarlyStoppingCallback needs the metric {args.best_metric}, which the evaluation did not return (it returned "
                f"{', '.join(metrics)}); set metric_for_best_model to one of them."
            )
        logged_value = float(metrics[args.best_metric])
        if args.larger_is_better:
            improvement = logged_value - self._best
        else:
            improvement = self._best - logged_value
        if math.isnan(self._best) or improvement > self.early_stopping_threshold:
            self._best = logged_value
            self._waited = 0
        else:
            self._waited += 1
        if self._waited >= self.early_stopping_patience:
            control.should_training_stop = True
            times = "evaluation" if self._waited == 1 else f"{self._waited} evaluations"
            control.stop_reason = (
                f"early stopping: {args.best_metric} has not improved for {times}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the number of evaluations since."""
        return {
            "best": None if math.isnan(self._best) else self._best,
            "waited": self._waited,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._best = math.nan if state["best"] is None else float(state["best"])
        self._waited = int(state["waited"])


class ProgressCallback(TrainerCallback):
    """Callback with a progress bar on the main process: loss, speed, time left, and the reason of an early stop.

    Evaluations are also written as lines of text; in a log file, so is every log.
    """

    def __init__(self) -> None:
        self._bar: Any = None  # Any: the facade's Progress

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Open the bar."""
        progress_bar = kwargs["accelerator"].progress(
            total=state.max_steps, initial=state.global_step, desc="train"
        )
        self._bar = progress_bar.__enter__()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Count the update."""
        self._bar.update()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Show the latest loss or metrics."""
        if self._bar is None:
            return
        logs = kwargs["logs"]
        bar_values = {}
        for metric_name, logged_value in logs.items():
            if metric_name in ("loss", args.best_metric):
                bar_values[metric_name] = logged_value
        if bar_values:
            self._bar.show(**bar_values)
        value_words = []
        for metric_name, logged_value in logs.items():
            if not metric_name.endswith(_TIMES):
                value_words.append(f"{metric_name} {_value_words(logged_value)}")
        log_line = " | ".join(
            [f"step {state.global_step}/{state.max_steps}", *value_words]
        )
        self._bar.note(
            log_line,
            unless_in_place=not any(
                metric_name.startswith("eval_") for metric_name in logs
            ),
        )

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Close the bar; write the reason if the training was stopped."""
        if self._bar is None:
            return
        self._bar.close()
        if control.should_training_stop or control.stop_reason:
            stop_reason = (
                control.stop_reason
                or "requested by a callback (control.should_training_stop)"
            )
            self._bar.note(
                f"stopped at step {state.global_step}/{state.max_steps}: {stop_reason}"
            )
        self._bar = None


def _value_words(logged_value: Any) -> str:  # Any: a value from compute_metrics
    if isinstance(logged_value, (int, float)):
        return value_text(logged_value)
    return str(logged_value)
