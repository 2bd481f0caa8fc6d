"""Epoch loops that resume automatically: their counters, saved and restored with the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hasten.optim.clock import StepClock
from hasten.prepare_args import PreparedObjects


@dataclass(slots=True, eq=False)
class _Loop:
    """One `for epoch in accelerator.epochs(...)`."""

    epoch: int = 0
    """Epoch of the running body, or the one to start with."""
    num_epochs: int = 0
    inside: bool = False
    """True if a body of this loop runs, or was left by `break`."""
    trained: bool = False
    """True if earlier processes have trained in this body."""
    num_passes: int = 0
    """Number of backward passes of the run at the start of this body."""
    inner: _Level = field(default_factory=lambda: _Level())
    loaded: bool = False
    """True if a state was loaded that has not taken effect yet."""


@dataclass(slots=True)
class _Level:
    """The loops inside one body, or outside of any, in the order of their start."""

    loops: list[_Loop] = field(default_factory=list)
    num_begun: int = 0
    """Number of loops that this process has started; the loops after them were loaded."""

    def begin(self) -> _Loop:
        if self.num_begun == len(self.loops):
            self.loops.append(_Loop())
        self.num_begun += 1
        return self.loops[self.num_begun - 1]


class EpochLoops:
    """The epoch loops of a run. A loop resumes in the epoch of its loaders' positions.

    Loops are identified by the order in which they start, inside the body of another loop or outside of any.
    """

    def __init__(self, objects: PreparedObjects, clock: StepClock) -> None:
        self._objects = objects
        self._clock = clock
        self._outermost = _Level()
        self._open: list[_Loop] = []
        self._left: tuple[int, list[int]] = 0, []
        """Backward passes of the run when a loop ended, and the complete passes over loaders in its last body."""

    def over(self, num_epochs: int) -> Iterator[int]:
        """Yield the epochs from 0, or from the resumed epoch, to `num_epochs` - 1."""
        loop = self._level().begin()
        loop.num_epochs = num_epochs
        self._open.append(loop)
        try:
            while self._next(loop) < num_epochs:
                yield loop.epoch
            loop.inside = False
        finally:
            self._open.remove(loop)
            self._left = (
                self._clock.num_passes,
                [loader.cursor.num_ended for loader in self._objects.loaders],
            )

    def share(self) -> float | None:
        """Return the completed share of the newest outermost loop; None before the first. Any thread may call it."""
        started = self._outermost.loops[: self._outermost.num_begun]
        if not started or not started[-1].num_epochs:
            return None
        return min(
            (started[-1].epoch + self._pass_share()) / started[-1].num_epochs, 1.0
        )

    def _pass_share(self) -> float:
        """Return the completed share of the pass over the first loader that is inside an epoch, if its length is known."""
        for loader in self._objects.loaders:
            source, start = loader.parts.source, loader.parts.iteration.start
            steps, size = source.steps(), source.size()
            if steps and (loader.is_running() or loader.parts.cursor.left):
                before = start.batches or (steps * start.consumed / size if size else 0)
                return min((before + loader.parts.cursor.batch) / steps, 1.0)
        return 0.0

    def _level(self) -> _Level:
        return self._open[-1].inner if self._open else self._outermost

    def _next(self, loop: _Loop) -> int:
        """Start the next body of the loop and return its epoch."""
        if loop.loaded:
            loop.loaded = False
            loop.inner.num_begun = 0
        else:
            if loop.inside:
                loop.epoch += 1
            loop.inner, loop.trained = _Level(), False
            for loader in self._objects.loaders:
                # the body has ended that could have continued loaded passes
                loader.end_pass(resumed=loop.inside)
        loop.inside, loop.num_passes = True, self._clock.num_passes
        return loop.epoch

    def _midway(self) -> list[int]:
        """Return the indices of the loaders that are inside an epoch."""
        found = []
        for index, loader in enumerate(self._objects.loaders):
            if loader.is_midway():
                found.append(index)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the counters as JSON values: the epoch at which each loop resumes, and its body's complete passes."""
        midway = self._midway()
        return {
            "loops": self._states(self._outermost, midway),
            "ended": self._ended() if midway else [],
        }

    def _ended(self) -> list[int]:
        """Return the number of passes over each loader that a resume of the current or last body must not repeat."""
        num_passes, ended = self._left
        # else the run has since trained outside epoch loops
        current = num_passes == self._clock.num_passes
        totals = []
        for index, loader in enumerate(self._objects.loaders):
            cursor = loader.parts.cursor
            if self._open:
                totals.append(cursor.num_again + cursor.num_ended)
            else:
                totals.append(
                    cursor.num_again
                    + (ended[index] if current and index < len(ended) else 0)
                )
        return totals

    def _states(self, level: _Level, midway: list[int]) -> list[dict[str, Any]]:
        states = []
        for loop in level.loops:
            states.append(self._state(loop, midway))
        return states

    def _state(self, loop: _Loop, midway: list[int]) -> dict[str, Any]:
        trained = loop.trained or self._clock.num_passes > loop.num_passes
        if not loop.inside:
            return _begin_at(loop.epoch)
        if not loop.loaded and self._over(loop, trained, midway):
            return _begin_at(loop.epoch + 1)
        return {
            "epoch": loop.epoch,
            "inside": True,
            "trained": trained,
            "inner": self._states(loop.inner, midway),
        }

    def _over(self, loop: _Loop, trained: bool, midway: list[int]) -> bool:
        """Return True if a resume starts after the running body: it has trained, and no loader is inside an epoch."""
        if midway or loop in self._open[:-1]:
            return False
        return (
            trained
            if self._objects.optimizers
            else any(x.cursor.num_ended for x in self._objects.loaders)
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the loops continue from `state`, once the loaders have their positions."""
        self._load(self._outermost, state["loops"])
        self._left = 0, []
        ended = [*state["ended"], *[0] * len(self._objects.loaders)]
        for loader, num_ended in zip(self._objects.loaders, ended, strict=False):
            loader.parts.cursor.num_ended, loader.parts.cursor.num_again = 0, num_ended

    def _load(self, level: _Level, saved: Sequence[Mapping[str, Any]]) -> None:
        """Load the states of the loops of a level; the next loop to start is the first that is not running."""
        if not level.loops and not saved:
            level.num_begun = 0
            return
        level.num_begun = next(
            (n for n, loop in enumerate(level.loops, 1) if loop in self._open), 0
        )
        del level.loops[max(len(saved), level.num_begun) :]
        level.loops += [_Loop() for _ in saved[len(level.loops) :]]
        for index, loop in enumerate(level.loops):
            state = saved[index] if index < len(saved) else _begin_at(0)
            loop.epoch, loop.inside, loop.trained = (
                state["epoch"],
                state["inside"],
                state["trained"],
            )
            loop.num_passes = self._clock.num_passes
            loop.loaded = True
            self._load(loop.inner, state["inner"])


def _begin_at(epoch: int) -> dict[str, Any]:
    return {"epoch": epoch, "inside": False, "trained": False, "inner": []}
