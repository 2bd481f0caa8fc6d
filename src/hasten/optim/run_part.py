"""Parts of a run: objects beside the training loop that act at its events, from hasten and from extensions.

The owner of the events is `StepClock.parts`. A part that does nothing at an event is not called there, so that it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # these import torch
    from torch import Tensor

    from hasten.optim.loader_progress import LoaderCursor
    from hasten.optim.window import Holder

Objects = tuple[Any, ...]
"""Arguments or results of a `prepare()`. Any: the user's models, optimizers, schedulers and loaders."""


class RunPart:
    """Base class of a part of a run, which overrides the events it needs.

    Events are called by the training thread of every rank, if not said otherwise. An error of a part ends the training.
    """

    unused_events: Collection[str] = ()
    """Events that this part overrides and does not need in this run."""
    needs_even_batches: str = ""
    """Reason why `join_uneven_inputs()` cannot be used with this part, and what to do; empty if it can."""

    # -- construction and prepare() -----------------------------------------------------------------------------------
    # Any: arguments of an Accelerator
    def settings(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments that replace those given to an Accelerator. Only parts of `in_every_run` are asked."""
        return given

    # Any: hasten.accelerator.components.Components, in an upper layer
    def built(self, run: Any) -> None:
        """Begin: the Accelerator is complete. `run.accelerator` is held weakly by threads and callbacks."""

    def preparing(self, objects: Objects) -> Objects:
        """Return what is prepared in place of the objects that a `prepare()` was given."""
        return objects

    def prepared(self, objects: Objects) -> Objects:
        """Return what a `prepare()` returns in place of the prepared objects."""
        return objects

    # Any: a hasten.data.source.BatchSource, in an upper layer
    def source(self, source: Any) -> Any:
        """Return the source from which the first prepared loader reads; with such a part, no batch is moved ahead of its use."""
        return source

    # -- loaders ------------------------------------------------------------------------------------------------------
    def pass_begins(self, cursor: LoaderCursor) -> None:
        """Handle the start of a pass over a loader."""

    def batch_ready(self, cursor: LoaderCursor) -> None:
        """Handle a batch that its loader is about to yield."""

    def batch(self, cursor: LoaderCursor) -> None:
        """Handle the request for the next batch, or for the end of the pass: no update is in progress."""

    def pass_ends(self, cursor: LoaderCursor) -> None:
        """Handle the end of a pass, complete or left; from the garbage collector too."""

    def epoch(self, epoch: int) -> None:
        """Handle the start of an epoch of `accelerator.epochs()`."""

    # -- a step -------------------------------------------------------------------------------------------------------
    def backward(self) -> None:
        """Handle the start of a backward pass."""

    def loss(self, loss: Tensor, weight: float | Tensor | None) -> None:
        """Handle the loss of a backward pass, before it (under pipeline parallelism, after it)."""

    def backward_done(self) -> None:
        """Handle the end of a backward pass."""

    def clipped(self, norm: Tensor) -> None:
        """Handle the norm of the gradients before they were clipped."""

    def gradients(self, optimizer: Holder) -> bool:
        """Change the gradients at the end of a window before they are read or used; called once or several times in each.

        Returns: True to skip the update, the same on every rank.
        """
        return False

    def before_update(self, optimizer: Holder) -> bool:
        """Handle gradients that are unscaled and normalised, before an update uses them.

        Returns: True to skip the update, the same on every rank.
        """
        return False

    def after_update(self, optimizer: Holder, applied: bool) -> None:
        """Handle the end of an update, which was `applied` or skipped."""

    def capturing(self) -> None:
        """Handle a call of `capture_step()`."""

    # -- checkpoints, logs and the end --------------------------------------------------------------------------------
    def before_save(self) -> str | None:
        """Handle the start of `save_state`; a text other than None is returned to the loop, and nothing is saved."""
        return None

    def after_save(self, error: BaseException | None) -> None:
        """Handle the end of `save_state`; a save in the background is still being written. With an error, some ranks may not have begun."""

    def saved(self, taken_s: float, seconds: float) -> None:
        """Handle a complete checkpoint of the state at `taken_s` (seconds since 1970), in any thread; `seconds` is the time of the whole save."""

    def before_load(self) -> None:
        """Handle the start of `load_state`."""

    def after_load(self, error: BaseException | None) -> None:
        """Handle the end of a `load_state` that has loaded a checkpoint, or has failed."""

    # Any: numbers, strings and tensors
    def log(self, values: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the values that `log()` hands to the trackers; None for none. Ranks: those that call `log()`."""
        return values

    def status(self) -> Mapping[str, float | str]:
        """Return values for progress bars, `hasten top` and metrics, in any thread, without waiting."""
        return {}

    # Any: a hasten.progress.meter.MeterReading
    def progress(self, bar: object, reading: Any, closed: bool) -> None:
        """Handle the display of a progress bar, which may be `closed` with it. Ranks: main only."""

    def stalled(self, seconds: float, over: bool) -> None:
        """Handle a wait of ranks for each other without progress, in any thread; `over` says that they continue."""

    def end(self) -> None:
        """End, in `end_training()`, before the trackers are closed."""


EVENTS: Final = tuple(
    name
    for name, value in vars(RunPart).items()
    if callable(value) and not name.startswith("_")
)


class RunParts:
    """The parts of a run, in the order of their events; each event is a tuple of the methods to call."""

    settings: tuple[Callable[[Mapping[str, Any]], Mapping[str, Any]], ...]
    built: tuple[Callable[[Any], None], ...]
    preparing: tuple[Callable[[Objects], Objects], ...]
    prepared: tuple[Callable[[Objects], Objects], ...]
    source: tuple[Callable[[Any], Any], ...]
    pass_begins: tuple[Callable[[LoaderCursor], None], ...]
    batch_ready: tuple[Callable[[LoaderCursor], None], ...]
    batch: tuple[Callable[[LoaderCursor], None], ...]
    pass_ends: tuple[Callable[[LoaderCursor], None], ...]
    epoch: tuple[Callable[[int], None], ...]
    backward: tuple[Callable[[], None], ...]
    loss: tuple[Callable[[Tensor, float | Tensor | None], None], ...]
    backward_done: tuple[Callable[[], None], ...]
    clipped: tuple[Callable[[Tensor], None], ...]
    gradients: tuple[Callable[[Holder], bool], ...]
    before_update: tuple[Callable[[Holder], bool], ...]
    after_update: tuple[Callable[[Holder, bool], None], ...]
    capturing: tuple[Callable[[], None], ...]
    before_save: tuple[Callable[[], str | None], ...]
    after_save: tuple[Callable[[BaseException | None], None], ...]
    saved: tuple[Callable[[float, float], None], ...]
    before_load: tuple[Callable[[], None], ...]
    after_load: tuple[Callable[[BaseException | None], None], ...]
    log: tuple[Callable[[Mapping[str, Any]], Mapping[str, Any] | None], ...]
    status: tuple[Callable[[], Mapping[str, float | str]], ...]
    progress: tuple[Callable[[object, Any, bool], None], ...]
    stalled: tuple[Callable[[float, bool], None], ...]
    end: tuple[Callable[[], None], ...]

    def __init__(self, *members: RunPart) -> None:
        self._set(members)

    def add(self, *members: RunPart) -> None:
        """Add parts, behind the others."""
        self._set((*self.members, *members))

    def forget(self, member: RunPart, *events: str) -> None:
        """Call a part at these events no more."""
        member.unused_events = (*member.unused_events, *events)
        self._set(self.members)

    def remove(self, removed_member: RunPart) -> None:
        """Remove a part, if it is there."""
        self._set(
            tuple(member for member in self.members if member is not removed_member)
        )

    def _set(self, members: tuple[RunPart, ...]) -> None:
        """Set the members, and for each event the methods of those that override and need it."""
        self.members = members
        for event in EVENTS:
            default = getattr(RunPart, event)
            listeners = []
            for member in members:
                is_overridden = getattr(type(member), event) is not default
                if is_overridden and event not in member.unused_events:
                    listeners.append(getattr(member, event))
            setattr(self, event, tuple(listeners))

    def names(self, event: str) -> str:
        """Return the names of the parts that act at an event."""
        listeners = getattr(self, event)
        return ", ".join(type(listener.__self__).__name__ for listener in listeners)

    def read_status(self) -> dict[str, float | str]:
        """Return the values of all parts for displays, in any thread."""
        values: dict[str, float | str] = {}
        for read in self.status:
            values |= read()
        return values

    def read_numbers(self) -> dict[str, float]:
        """Return the numbers among these values, in any thread."""
        return {
            name: value
            for name, value in self.read_status().items()
            if not isinstance(value, str)
        }

    def __str__(self) -> str:
        """Return the parts with their events, one a line."""
        lines = []
        for member in self.members:
            events = []
            for event in EVENTS:
                for listener in getattr(self, event):
                    if listener.__self__ is member:
                        events.append(event)
            lines.append(f"{type(member).__name__}: {', '.join(events)}")
        return "\n".join(lines)


# scripts create Accelerators without arguments from hasten, so these parts are process-wide
@cache
def parts_of_every_run() -> list[RunPart]:
    """Return the parts of all Accelerators that this process creates; empty in training."""
    return []


@contextmanager
def in_every_run(member: RunPart) -> Iterator[None]:
    """Context manager in which every Accelerator that this process creates has this part, and none of extensions.

    Tools use it that run a script's loop without training, to trace one step or to time the first updates.
    """
    members = parts_of_every_run()
    members.append(member)
    try:
        yield
    finally:
        members.remove(member)
