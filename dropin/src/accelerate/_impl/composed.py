"""What the parts of an Accelerator ask of the whole, as a protocol: they know no class above them."""

from __future__ import annotations

from typing import Any, Protocol

from hasten.accelerator.preparing import Prepared
from hasten.accelerator.rehearsal import Rehearsal
from hasten.accelerator.saving import Saving
from hasten.comm.base import Comm
from hasten.config.root import Config
from hasten.optim.clock import StepClock
from hasten.precision.base import Precision
from hasten.runtime.context import ProcessContext
from hasten.strategies.base import Strategy


class Composed(Protocol):
    """An Accelerator, seen from its parts."""

    config: Config
    ctx: ProcessContext
    strategy: Strategy
    precision: Precision
    clock: StepClock
    prepared: Prepared
    saving: Saving
    rehearsal: Rehearsal
    dataloader_config: Any  # the established class, above this file
    rng_types: list[str]
    step_scheduler_with_optimizer: bool

    def reconfigure(self, **sections: Any) -> None:  # Any: sections of every type
        """Replace sections of the settings before the first model is prepared."""
        ...

    def readers(self) -> Comm:
        """The processes that have samples of their own."""
        ...

    def follow_plugins(self) -> None:
        """Take over what was changed in plugins since the last prepare()."""
        ...
