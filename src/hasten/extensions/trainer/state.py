"""Progress of a training (TrainerState) and requests of callbacks (TrainerControl). Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass
class TrainerState:
    """Progress of the training; equal on every rank, saved with every checkpoint."""

    epoch: float = 0.0
    global_step: int = 0
    """Number of updates so far."""
    max_steps: int = 0
    """Number of updates at the end, if the number of processes does not change again."""
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
    # Any: numbers and strings
    log_history: list[dict[str, Any]] = field(default_factory=list)
    callbacks: dict[str, Any] = field(default_factory=dict)  # Any: each callback's JSON
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: everything but the ranks of this process."""
        state_values = asdict(self)
        del state_values["is_world_process_zero"], state_values["is_local_process_zero"]
        return state_values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        field_names = {state_field.name for state_field in fields(self)}
        for name, value in state.items():
            if name in field_names:
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
