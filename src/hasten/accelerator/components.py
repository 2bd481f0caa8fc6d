"""Access to the components of an Accelerator for hasten's Trainer, its tools and the drop-in.

Scripts need none of them, so they are private attributes of the class. Other modules read them through `components()` alone; subclasses
of the Accelerator use the attributes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.accelerator.facade import Accelerator
    from hasten.optim.clock import StepClock
    from hasten.precision.base import Precision
    from hasten.prepare_args import PreparedObjects
    from hasten.state.epochs import EpochLoops
    from hasten.state.preemption import Preemption
    from hasten.state.saving import Saving
    from hasten.strategies.base import Strategy
    from hasten.tracking.manager import TrackerManager
    from hasten.tracking.run_log import RunLog


class Components:
    """Read-only view on the components of an Accelerator."""

    __slots__ = ("_accelerator",)

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    @property
    def accelerator(self) -> Accelerator:
        """The Accelerator itself."""
        return self._accelerator

    @property
    def clock(self) -> StepClock:
        """The counter of micro-steps and updates, and the weights of losses."""
        return self._accelerator._clock

    @property
    def prepared(self) -> PreparedObjects:
        """The models, optimizers, schedulers and loaders that `prepare()` has returned."""
        return self._accelerator._prepared

    @property
    def saving(self) -> Saving:
        """Saving and loading of checkpoints."""
        return self._accelerator._saving

    @property
    def preemption(self) -> Preemption:
        """Handler of the signals to stop."""
        return self._accelerator._preemption

    @property
    def right_lengths(self) -> set[int]:
        """Lengths of schedules about which `prepare()` does not warn."""
        return self._accelerator._preparer.right_lengths

    @property
    def publishing(self) -> Any:  # Any: a class of an extension
        """Uploads of models to the Hub."""
        return self._accelerator._publishing

    @property
    def strategy(self) -> Strategy:
        """The distribution of models over ranks."""
        return self._accelerator._strategy

    @property
    def precision(self) -> Precision:
        """The compute precision."""
        return self._accelerator._precision

    @property
    def tracking(self) -> TrackerManager:
        """The trackers of this run."""
        return self._accelerator._tracking

    @property
    def run_log(self) -> RunLog | None:
        """The run log of this rank; None without one."""
        return self._accelerator._run_log

    @property
    def epochs(self) -> EpochLoops:
        """The loops over epochs."""
        return self._accelerator._epochs

    def is_checked(self, setting: str) -> bool:
        """Return whether this Accelerator runs the check of a setting: one with a context of its caller, only if code asks for it."""
        return self._accelerator._is_checked(setting)

    @property
    def rolling_back(self) -> bool:
        """True if the newest checkpoint will be loaded before the next batch."""
        return self._accelerator._rolling_back


def components(accelerator: Accelerator) -> Components:
    """Return the components of an Accelerator."""
    return Components(accelerator)
