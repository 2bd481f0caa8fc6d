"""Epoch loops that resume automatically: their counters, saved and restored with the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hasten.errors import StepError
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
    loaded: bool = False
    """True if a state was loaded that has not taken effect yet."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class EpochLoops:
    """The epoch loops of a run, identified by their order. A loop resumes in the epoch of its loaders' positions."""

    _objects: PreparedObjects
    _clock: StepClock
    loops: list[_Loop] = field(default_factory=list)
    _num_started: int = 0
    """Number of loops that this process has started; the loops after them were loaded."""
    _running: _Loop | None = None
    _left: tuple[int, tuple[int, ...]] = (0, ())
    """Backward passes of the run when a loop ended, and the complete passes over loaders in its last body."""

    def over(self, num_epochs: int) -> Iterator[int]:
        """Yield the epochs from 0, or from the resumed epoch, to `num_epochs` - 1.

        Raises: StepError inside another loop.
        """
        if self._running is not None:
            raise StepError(
                "accelerator.epochs() was called inside another loop over epochs, and a checkpoint holds the epoch of one. Use range() "
                "for the outer or the inner loop."
            )
        if self._num_started == len(self.loops):
            self.loops.append(_Loop())
        self._num_started += 1
        loop = self._running = self.loops[self._num_started - 1]
        loop.num_epochs = num_epochs
        try:
            while self._next(loop) < num_epochs:
                yield loop.epoch
            loop.inside = False
        finally:
            self._running = None
            num_ended = tuple(
                loader.cursor.num_ended for loader in self._objects.loaders
            )
            self._left = self._clock.num_passes, num_ended

    def share(self) -> float | None:
        """Return the completed share of the newest loop; None before the first. Any thread may call it."""
        started_loops = self.loops[: self._num_started]
        if not started_loops or not started_loops[-1].num_epochs:
            return None
        newest = started_loops[-1]
        return min((newest.epoch + self._pass_share()) / newest.num_epochs, 1.0)

    def _pass_share(self) -> float:
        """Return the completed share of the pass over the first loader that is inside an epoch, if its length is known."""
        for loader in self._objects.loaders:
            source = loader.parts.source
            start_position = loader.parts.iteration.start
            num_steps = source.steps()
            num_samples = source.size()
            if num_steps and (loader.is_running() or loader.parts.cursor.left):
                num_before = start_position.batches or (
                    num_steps * start_position.consumed / num_samples
                    if num_samples
                    else 0
                )
                return min((num_before + loader.parts.cursor.batch) / num_steps, 1.0)
        return 0.0

    def _next(self, loop: _Loop) -> int:
        """Start the next body of the loop and return its epoch."""
        if loop.loaded:
            loop.loaded = False
        else:
            if loop.inside:
                loop.epoch += 1
            loop.trained = False
            for loader in self._objects.loaders:
                # the body has ended that could have continued loaded passes
                loader.end_pass(resumed=loop.inside)
        loop.inside = True
        loop.num_passes = self._clock.num_passes
        return loop.epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the counters as JSON values: the epoch at which each loop resumes, and its body's complete passes."""
        is_midway = False
        for loader in self._objects.loaders:
            is_midway = is_midway or loader.is_midway()
        loop_states = []
        for loop in self.loops:
            loop_states.append(self._describe_loop(loop, is_midway))
        return {"loops": loop_states, "ended": self._ended() if is_midway else []}

    def _ended(self) -> list[int]:
        """Return the number of passes over each loader that a resume of the current or last body must not repeat."""
        num_passes, num_ended = self._left
        # else the run has since trained outside epoch loops
        is_current = num_passes == self._clock.num_passes
        num_passes_of_loaders = []
        for index, loader in enumerate(self._objects.loaders):
            cursor = loader.parts.cursor
            if self._running is not None:
                num_passes_of_loaders.append(cursor.num_again + cursor.num_ended)
            else:
                num_passes_of_loaders.append(
                    cursor.num_again
                    + (num_ended[index] if is_current and index < len(num_ended) else 0)
                )
        return num_passes_of_loaders

    def _describe_loop(self, loop: _Loop, is_midway: bool) -> dict[str, Any]:
        has_trained = loop.trained or self._clock.num_passes > loop.num_passes
        if not loop.inside:
            return _begin_at(loop.epoch)
        if not loop.loaded and self._is_over(has_trained, is_midway):
            return _begin_at(loop.epoch + 1)
        return {"epoch": loop.epoch, "inside": True, "trained": has_trained}

    def _is_over(self, has_trained: bool, is_midway: bool) -> bool:
        """Return True if a resume starts after the running body: it has trained, and no loader is inside an epoch."""
        if is_midway:
            return False
        if self._objects.optimizers:
            return has_trained
        return any(loader.cursor.num_ended for loader in self._objects.loaders)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the loops continue from `state`, once the loaders have their positions."""
        self._num_started = 0
        if self._running is not None:
            self._num_started = self.loops.index(self._running) + 1
        # the next loop to start is the first that is not running
        saved_loops = state["loops"]
        del self.loops[max(len(saved_loops), self._num_started) :]
        while len(self.loops) < len(saved_loops):
            self.loops.append(_Loop())
        for index, loop in enumerate(self.loops):
            saved = saved_loops[index] if index < len(saved_loops) else _begin_at(0)
            loop.epoch = saved["epoch"]
            loop.inside = saved["inside"]
            loop.trained = saved["trained"]
            loop.num_passes = self._clock.num_passes
            loop.loaded = True
        self._left = 0, ()
        num_ended_of_loaders = [*state["ended"], *[0] * len(self._objects.loaders)]
        for loader, num_ended in zip(
            self._objects.loaders, num_ended_of_loaders, strict=False
        ):
            loader.parts.cursor.num_ended, loader.parts.cursor.num_again = 0, num_ended


def _begin_at(epoch: int) -> dict[str, Any]:
    return {"epoch": epoch, "inside": False, "trained": False}
