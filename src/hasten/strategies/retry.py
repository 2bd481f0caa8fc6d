"""How a wrapped model takes part in a step that may have to be run again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Retry(Protocol):
    """One model during one step. Forward and backward run in passes; a pass that fails is recovered from, then undone."""

    meets: bool
    """Forward and backward are collectives: a rank that stops in their middle leaves the others waiting."""

    def begin(self) -> None:
        """Run the collectives that the next pass would begin with, and remember what `put_back` restores. Ranks: every rank."""
        ...

    def quiet(self, last: bool) -> AbstractContextManager[object]:
        """A block for one pass, which leaves gradients unsynchronised as far as `reduce` can synchronise them later."""
        ...

    def recover(self) -> None:
        """Make the model usable again after an error in the middle of a pass. Local."""
        ...

    def put_back(self) -> None:
        """Undo what passes have left in the wrapper, besides parameters, buffers and their .grad. Local."""
        ...

    def reduce(self, used: Sequence[bool]) -> None:
        """Synchronise gradients where a window ends; `used` says which parameters have one on any rank. Ranks: every rank."""
        ...


class Whole:
    """A model of one process."""

    meets = False

    def begin(self) -> None:
        return None

    def quiet(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def recover(self) -> None:
        return None

    def put_back(self) -> None:
        return None

    def reduce(self, used: Sequence[bool]) -> None:
        return None
