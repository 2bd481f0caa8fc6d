"""What a loss counts for that is the mean over a part of a batch only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from hasten.errors import StepError

if TYPE_CHECKING:
    from hasten.optim.window import Number, Window


@dataclass(slots=True)
class Part:
    """One part of a batch that is run in several passes; a share of zero is a pass that must not count."""

    share: float
    """Its rows, divided by those of the batch."""
    weight: Number | None = None
    """The weight its loss was given."""

    def weigh(self, window: Window, loss: Tensor, weight: Number | None) -> tuple[Tensor, Number | None]:
        """The loss and the weight that the window should see.

        Raises: StepError for a second weighted loss.
        """
        if weight is None:
            return loss * self.share, None
        if window.turn > 0:
            raise StepError(
                "run_step() got a second backward(weight=...) in one micro-step. Each weighted loss is divided by its own total "
                "weight, which is known only when all parts of the batch have run. Add the losses before backward(), or call "
                "backward() without a weight."
            )
        weight = weight * (self.share > 0)
        self.weight = weight
        return loss, weight
