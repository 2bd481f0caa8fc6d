"""What the training loop does differently when replicas of the model may be lost: nothing in other runs."""

from __future__ import annotations

from collections.abc import Callable

from hasten.accelerator.components import components
from hasten.errors import ConfigError
from hasten.extensions.trainer.interface import TrainerInterface


class Replicas:
    """The replicas of a training, as far as its loop depends on them."""

    def __init__(self, trainer: TrainerInterface, state_was_replaced: Callable[[], None]) -> None:
        """Follow the replicas; `state_was_replaced` is called when this one has received the run's state from another.

        Raises: ConfigError for a number of epochs that replicas cannot end with.
        """
        self._trainer = trainer
        self._state_was_replaced = state_was_replaced
        self._num_received = 0.0
        self.end_with_epochs = trainer.has_replicas and trainer.args.max_steps <= 0
        """True if the training ends with the last epoch, whose number of updates depends on the replicas that are present."""
        num_epochs = trainer.args.num_train_epochs
        if self.end_with_epochs and num_epochs % 1:
            raise ConfigError(
                f"num_train_epochs={num_epochs} ends inside an epoch, whose updates depend on the replicas that survive; give a whole "
                "number of epochs, or max_steps."
            )

    def have_counted_epoch(self) -> bool:
        """Return True if this replica runs through an epoch that the run has completed and the state already counts."""
        trainer = self._trainer
        return trainer.has_replicas and trainer.state.epochs_done >= int(trainer.train_loader.epoch)

    def receive_state(self) -> bool:
        """Return whether this replica has received the run's state from another since the last call, and continue from there."""
        if not self._trainer.has_replicas:
            return False
        num_received = components(self._trainer.accelerator).clock.parts.read_numbers()["replica_healed"]
        if num_received == self._num_received:
            return False
        self._num_received = num_received
        self._state_was_replaced()
        return True
