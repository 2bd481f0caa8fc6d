"""The step clock: counts micro-steps and finds the one that ends its accumulation window; callbacks of a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from torch import Tensor

from hasten.config.sections.loop import MAX_MICRO_STEPS
from hasten.errors import ConfigError, StepError
from hasten.optim.gradients import Unowned
from hasten.optim.loader_progress import ActiveLoaders, LoaderCursor, StepObserver
from hasten.optim.loss_weights import LossWeights
from hasten.optim.window import Holder, Key, Number, SeparateGradients, Window, hold

__all__ = ["LoaderCursor", "StepClock"]

_RECENT: Final = 16
"""Number of updates without a call after which an optimizer counts as inactive."""


class StepPhases(Protocol):
    """Callbacks for timing the phases of a training step; each call closes the phase since the previous one."""

    def asked(self, unused: bool = False) -> None:
        """Record that the loop requests the next batch from its loader; `unused` means that no backward used the previous one."""
        ...

    def got(self, num_samples: int) -> None:
        """Record that the loader returns a batch of `num_samples` samples over all ranks."""
        ...

    def optimizer_done(self) -> None:
        """Record that an optimizer has attempted an update."""
        ...

    def skipped(self) -> None:
        """Record that the update was skipped, because gradients overflowed."""
        ...


@dataclass(slots=True)
class StepListener:
    """Callbacks at the phases of a step; each may be None."""

    phases: StepPhases | None = None
    """Timing of the phases."""
    update_begins: Callable[[], None] | None = None
    """Called when an optimizer starts an update, if updates are timed separately."""
    before_update: Callable[[Holder], bool] | None = None
    """Called with the optimizer before it uses the gradients at a boundary; True skips the update, on every rank."""
    after_update: Callable[[], None] | None = None
    """Called after an optimizer has used the gradients at a boundary."""
    rates: Callable[[], Mapping[str, float]] | None = None
    """Returns tokens a second and MFU, while they are tracked."""


@dataclass(slots=True, weakref_slot=True)
class StepClock:
    """Counter of micro-steps and windows, one window per group of models.

    The gradient that reaches the optimizer is the mean over the window (or the weighted mean over the window and
    all ranks). Losses are weighed with the facts known when they arrive; the rest is applied to the gradients once,
    at the window's end, by the first code that uses them (see `correction`).
    """

    every: int = 1
    weights: LossWeights = field(default_factory=LossWeights)
    sync_with_dataloader: bool = True
    full_divisor: bool = False
    """True if a short window is divided by `every`, not by its number of micro-steps."""
    boundary: bool = True
    """True if the current micro-step ends its window: gradients are synchronised and optimizers step."""
    interrupted: bool = False
    """True if the current micro-step ended with an error and was rolled back."""
    pending: bool = False
    """True if the current window's gradients must be multiplied by `correction()` before use."""
    _windows: dict[Key | None, Window] = field(default_factory=dict)
    _current: Window = field(init=False)
    loaders: ActiveLoaders = field(default_factory=ActiveLoaders)
    """The loaders being iterated."""
    _serial: int = 0
    num_updates: int = 0
    """Number of steps of any optimizer at a boundary."""
    num_passes: int = 0
    """Number of backward passes of this run."""
    inside: list[tuple[Key, Sequence[object]]] = field(default_factory=list)
    """The active accumulate() blocks, outermost first: their keys and models."""
    _holders: list[weakref.ref[Holder]] = field(default_factory=list)
    alone: bool = True
    """True if there is at most one optimizer."""
    listener: StepListener | None = None
    """Callbacks of a step; None if there are none."""
    apart: bool = False
    """True if ranks train separately on purpose, or may be at different batches: nothing can be compared over ranks."""
    exchange: Callable[[Holder], bool] | None = None
    """Called with an optimizer before its gradients are read or used at a boundary, possibly several times: averages them over replicas
    that are separate worlds. True skips the update, because the optimizer has received the state after it."""
    members: Callable[[], Mapping[str, float | str]] | None = None
    """Returns the replicas of the run for the status of this rank; None for a run that cannot lose any."""
    unowned: Unowned | None = None
    """Gradients of trained parameters that no optimizer holds, if there are such parameters."""

    def __post_init__(self) -> None:
        if self.every != 1 or isinstance(self.every, bool):
            check_every(self.every)
        self._current = self._open(None)

    @property
    def active(self) -> LoaderCursor | None:
        """The innermost loader being iterated."""
        return self.loaders.innermost()

    @property
    def rates(self) -> Callable[[], Mapping[str, float]] | None:
        """Function that returns tokens a second and MFU; None while they are not tracked."""
        return None if self.listener is None else self.listener.rates

    @property
    def micro(self) -> int:
        """Number of micro-steps started in the current window."""
        return self._current.micro

    @property
    def serial(self) -> int:
        """Unique number of the current window."""
        return self._current.serial

    @property
    def in_flight(self) -> int:
        """Number of losses whose gradients no optimizer has used yet, this window's included."""
        return sum(w.losses for w in self._windows.values() if w is self._current or not w.closed)

    @property
    def may_clear(self) -> bool:
        """True if gradients may be set to zero now without losing any of the window's.

        False at the start of a window's last micro-step, where a loop that clears before its backward would discard the
        other micro-steps' gradients.
        """
        window = self._current
        return self.interrupted or (self.boundary and (window.before == 0 or window.losses > window.before))

    @property
    def crowded(self) -> bool:
        """True if several optimizers share windows of several micro-steps."""
        return not self.alone and self._current.micro > 0 and self._current.every > 1

    @property
    def shared(self) -> bool:
        """True if several optimizers share a window that has earlier micro-steps."""
        return self.crowded and self._current.before > 0

    def join(self, holder: Holder) -> None:
        """Register an optimizer with the clock."""
        self._holders = [known for known in self._holders if known() is not None]
        self._holders.append(weakref.ref(holder))
        self.alone = len(self._holders) < 2

    def holders(self) -> Iterator[Holder]:
        """Yield the optimizers that still exist."""
        for known in self._holders:
            if (holder := known()) is not None:
                yield holder

    def watching(self, cursor: LoaderCursor) -> StepObserver:
        """Return a context manager in which `cursor` is the active loader, until a loader inside it starts."""
        return StepObserver(self.loaders, cursor, self)

    def listening(self) -> StepListener:
        """Return the callbacks of a step, to set one of them."""
        if self.listener is None:
            self.listener = StepListener()
        return self.listener

    def tick(self, key: Key = ()) -> bool:
        """Start a micro-step of the window named by `key`; return True if it is the window's last.

        A change of `every` takes effect with the next window.
        """
        window = self._windows.get(key)
        if window is None or window.closed or window.micro == 0:  # 0: its first micro-step was rolled back
            window = self._open(key)
        window.micro += 1
        window.before = window.losses
        window.turn = 0
        self._current = window
        self.interrupted = False
        at_end = self.loaders.tick(window.micro > 1)
        window.closed = self.boundary = window.micro >= window.every or (at_end and self.sync_with_dataloader)
        self.pending = self.boundary and self.correction_due()
        if self.boundary and not self.alone and self.shared:
            for holder in self.holders():
                holder.note_gradients()
        return self.boundary

    def begin_at(self, key: Key, micro: int) -> None:
        """Let the next micro-step of this window follow `micro` others, however many there were."""
        window = self._windows.get(key) or self._open(key)
        window.micro, window.closed = micro, False

    def is_open(self, key: Key) -> bool:
        """Return True if a window of this name has started and not ended."""
        window = self._windows.get(key)
        return window is not None and window.micro > 0 and not window.closed

    def interrupt(self, key: Key = ()) -> None:
        """Roll back a micro-step that ended with an error; its window continues without it."""
        window = self._current = self._windows[key]
        window.micro -= 1
        window.closed = self.pending = False
        window.losses = window.before
        self.interrupted = True

    def forget(self) -> None:
        """Record that gradients accumulated before an interruption were cleared; the window continues without them."""
        window = self._current
        window.missing = window.micro
        window.losses = window.before = 0
        window.weights, window.weighted, window.separate_gradients = [], None, None
        self.interrupted = False

    def weigh(self, loss: Tensor, weight: Number | None = None) -> tuple[Tensor, int]:
        """Return the loss to backpropagate, multiplied by its share of the weight, and the remaining divisor.

        Raises: StepError when weighted and unweighted losses are mixed in one window.
        """
        window = self._current
        if window.closed and window.micro == 0:  # no accumulate(): an optimizer has used the last window
            if weight is None and window.weighted is False:  # the hot path: plain windows have equal settings
                window.closed, window.every = False, self.every
            else:
                waiting = window.losses
                window = self._current = self._open(None)
                window.losses = waiting
                self.pending = False
        elif window.micro == window.losses == 0:  # nothing was divided by an earlier length
            window.every = self.every
        if window.weighted is None:
            window.weighted = weight is not None
        elif window.weighted is (weight is None):
            raise StepError(
                "backward() got losses with and without weight= in one accumulation window; their gradients have no "
                "common denominator. Give every backward() of a window a weight, or none."
            )
        window.losses += 1
        if self.unowned is not None:
            self.unowned.begin(weight is not None or (window.micro > 0 and window.every > 1))
        weights = self.weights
        if weights.idle:
            loss, weight = (loss * 0, None) if weight is None else (loss, weight * 0)
        if weight is None:
            if weights.share is not None:
                loss = loss * weights.share
            return loss, window.every
        share = weights.weigh(window, loss, weight, self.boundary, list(self.holders()), self.unowned)
        self.pending = self.boundary
        return share, 1

    def holding(self) -> Callable[[], None]:
        """Return a function that restores the windows to their current state."""
        current, boundary, pending, unit = self._current, self.boundary, self.pending, self.weights.unit
        windows = hold(self._windows)

        def put_back() -> None:
            self._windows = windows()
            self._current, self.boundary, self.pending, self.weights.unit = current, boundary, pending, unit

        return put_back

    def correction(self) -> float | Tensor | None:
        """Return the factor for the current window's gradients before they are used; None for no correction.

        Ranks: every rank of the loss axes, because a weighted window agrees on its total weight here (once).
        """
        window = self._current
        if window.weighted:
            return self.weights.correction(window)
        length = window.micro - window.missing
        complete = window.micro == 0 or self.full_divisor or length in (0, window.every)
        return None if complete else window.every / length

    def window_weights(self) -> list[float] | None:
        """Return the total weight of each loss of the current window on this rank; None for losses without weights."""
        window = self._current
        return [float(weight) for weight in window.weights] if window.weighted else None

    def force(self, boundary: bool) -> None:
        """Make the current micro-step a boundary or not, regardless of the count."""
        window = self._current
        self.boundary = boundary
        if window.micro > 0:
            window.closed = boundary
        self.pending = boundary and self.correction_due()

    def correction_due(self) -> bool:
        """Return True if the current window, if it ended here, would need a correction."""
        window = self._current
        if window.weighted or self.full_divisor:
            return bool(window.weighted)
        return window.micro > 0 and window.micro - window.missing != window.every

    def used(self) -> None:
        """Record that an optimizer has used the current gradients: without accumulate(), the window ends here.

        Its losses stay in flight while another optimizer holds their gradients.
        """
        window = self._current
        window.closed = True
        self.num_updates += 1
        listener = self.listener
        if listener is not None and listener.phases is not None:
            listener.phases.optimizer_done()
        if self.alone or not self._waiting():
            window.losses = window.before = 0
        if listener is not None and listener.after_update is not None:
            listener.after_update()

    def _waiting(self) -> bool:
        """Return True if an active optimizer has gradients it has not used."""
        return any(
            not holder.spent
            and self.num_updates - holder.called_at < _RECENT
            and any(p.grad is not None for p in holder.parameters)
            for holder in self.holders()
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each open window as plain JSON values."""
        opened = [(key, w) for key, w in self._windows.items() if not w.closed and (key is not None or w.losses)]
        if any(window.separate_gradients is not None for _, window in opened):
            raise StepError(
                "the state was asked for in the middle of a window with several weighted losses per micro-step; their "
                "gradients are kept apart until the window ends and are not part of a checkpoint. Save where "
                "accelerator.sync_gradients is true, after the optimizer's step."
            )
        return {
            "every": self.every,
            "unit": self.weights.unit,
            "boundary": self.boundary,
            "windows": [window.as_plain(key, window is self._current) for key, window in opened],
        }

    def load_state_dict(self, state: Mapping[str, Any], gradients: bool = False) -> None:
        """Restore the windows.

        `gradients` means that the windows' accumulated gradients are restored in the parameters' .grad; without it,
        they are counted as missing.
        """
        self.weights.unit = state["unit"]
        self._windows.clear()
        self._current = self._open(None)
        self.boundary, self.pending = True, False
        for saved in state["windows"]:
            if saved["key"] is None and not gradients:
                continue
            window = self._open(None if saved["key"] is None else tuple(saved["key"]))
            window.every = saved["every"]
            window.micro = window.missing = saved["micro"]
            if gradients:
                window.missing, window.weighted = saved["missing"], saved["weighted"]
                window.losses, window.weights = saved["losses"], [saved["weight"]] if saved["weighted"] else []
            if saved["key"] is None or (gradients and saved["current"]):
                self._current, self.boundary = window, state["boundary"]

    def _open(self, key: Key | None) -> Window:
        self._serial += 1
        if not self.alone:
            for holder in self.holders():
                holder.clear_late()
        last = self._windows.get(key)
        if last is not None and last.separate_gradients is not None:
            last.separate_gradients.refuse_leftovers(
                p for holder in self.holders() if not holder.spent for p in holder.parameters
            )
        window = self._windows[key] = Window(self.every, self._serial)
        return window

    @property
    def separate_gradients(self) -> SeparateGradients | None:
        """Gradients that the current window accumulates separately, if any."""
        return self._current.separate_gradients

    def merge_gradients(self, parameters: list[Tensor]) -> None:
        """Set these parameters' gradients to the sum over the losses, each corrected by weight. Ranks: every rank."""
        self.weights.merge_gradients(self._current, parameters)


def check_every(every: object) -> None:
    """Raise ConfigError unless `every` is a valid window length."""
    if not isinstance(every, int) or isinstance(every, bool) or not 1 <= every <= MAX_MICRO_STEPS:
        raise ConfigError(
            f"gradient_accumulation_steps={every!r} is not a whole number of at least 1 and at most {MAX_MICRO_STEPS}; a window of that "
            f"length never ends. Set it to 1 to update after every backward()."
        )
