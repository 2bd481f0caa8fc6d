"""Access to the components of an Accelerator for hasten's Trainer, its tools and the drop-in.

Scripts need none of them, so they are private attributes of the class. Other modules read them through `components()` alone; subclasses
of the Accelerator use the attributes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

    __slots__ = ("accelerator",)

    accelerator: Any  # Any: the Accelerator itself, whose module imports this one
    clock: StepClock
    """The counter of micro-steps and updates, and the weights of losses."""
    prepared: PreparedObjects
    """The models, optimizers, schedulers and loaders that `prepare()` has returned."""
    saving: Saving
    """Saving and loading of checkpoints."""
    preemption: Preemption
    """Handler of the signals to stop."""
    publishing: Any  # Any: a class of an extension
    """Uploads of models to the Hub."""
    strategy: Strategy
    """The distribution of models over ranks."""
    precision: Precision
    """The compute precision."""
    tracking: TrackerManager
    """The trackers of this run."""
    run_log: RunLog | None
    """The run log of this rank; None without one."""
    epochs: EpochLoops
    """The loops over epochs."""

    def __init__(self, accelerator: Any) -> None:  # Any: the Accelerator, as above
        self.accelerator = accelerator

    # hidden from type checkers, which would otherwise accept any attribute
    if not TYPE_CHECKING:

        def __getattr__(self, name):
            if name not in Components.__annotations__:
                raise AttributeError(f"an Accelerator has no component {name!r}")
            return getattr(self.accelerator, f"_{name}")

    @property
    def right_lengths(self) -> set[int]:
        """Lengths of schedules about which `prepare()` does not warn."""
        lengths: set[int] = self.accelerator._preparer.right_lengths
        return lengths

    def is_checked(self, setting: str) -> bool:
        """Return whether this Accelerator runs the check of a setting: one with a context of its caller, only if code asks for it."""
        checks: bool = self.accelerator._is_checked(setting)
        return checks


def components(accelerator: Any) -> Components:  # Any: an Accelerator, as above
    """Return the components of an Accelerator."""
    return Components(accelerator)
