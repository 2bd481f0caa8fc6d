"""The step clock: counts micro-steps and finds the one that ends the accumulation window; owns the parts of the run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Final

from torch import Tensor

from hasten.config.sections.loop import MAX_MICRO_STEPS
from hasten.errors import ConfigError, StepError
from hasten.optim.loader_progress import ActiveLoaders, LoaderCursor
from hasten.optim.loss_weights import LossWeights
from hasten.optim.run_part import RunParts
from hasten.optim.window import Holder, Number, Window

__all__ = ["LoaderCursor", "StepClock"]

_RECENT: Final = 16
"""Number of updates without a call after which an optimizer counts as inactive."""


@dataclass(slots=True, weakref_slot=True)
class StepClock:
    """Counter of micro-steps of one Accelerator, which has one accumulation window.

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
    checks_models: bool = True
    """True if all micro-steps of a window must be of the same models."""
    interrupted: bool = False
    """True if the current micro-step ended with an error and was rolled back."""
    needs_correction: bool = False
    """True if the current window's gradients must be multiplied by `correction()` before use."""
    is_inside: bool = False
    """True inside an accumulate() block."""
    _window: Window = field(init=False)
    loaders: ActiveLoaders = field(default_factory=ActiveLoaders)
    """The loaders being iterated."""
    read_position: Callable[[], object] | None = None
    """Returns the position of the loop, to keep it from the beginning of a window; None if nothing is saved."""
    position: object | None = None
    """The loop's position at the beginning of the window that is open, or that the next micro-step opens."""
    _position_time: int = 0
    """Time at which it was read, in moves of all loaders."""
    num_updates: int = 0
    """Number of steps of any optimizer at a boundary."""
    num_passes: int = 0
    """Number of backward passes of this run."""
    _holders: list[weakref.ref[Holder]] = field(default_factory=list)
    has_one_optimizer: bool = True
    """True if there is at most one optimizer."""
    parts: RunParts = field(default_factory=RunParts)
    """What acts at the events of this run."""
    trains_separately: bool = False
    """True if ranks train separately on purpose, or may be at different batches: nothing can be compared over ranks."""
    has_unowned: bool = False
    """True if no optimizer holds some trained parameters, whose gradients are not unscaled, normalised or saved."""

    def __post_init__(self) -> None:
        if self.every != 1 or isinstance(self.every, bool):
            check_every(self.every)
        self._window = Window(self.every, serial=1)

    def __getstate__(self) -> tuple[None, dict[str, Any]]:  # Any: values of the fields
        """Return what a copy counts with; parts, optimizers and the position of the loop are only the original's."""
        state = {field.name: getattr(self, field.name) for field in fields(self)}
        return None, state | {
            "read_position": None,
            "parts": RunParts(),
            "_holders": [],
        }

    @property
    def active(self) -> LoaderCursor | None:
        """The innermost loader being iterated."""
        return self.loaders.innermost_cursor()

    @property
    def micro(self) -> int:
        """Number of micro-steps started in the current window."""
        return self._window.micro

    @property
    def serial(self) -> int:
        """Unique number of the current window."""
        return self._window.serial

    @property
    def in_flight(self) -> int:
        """Number of losses whose gradients no optimizer has used yet."""
        return self._window.losses

    @property
    def num_earlier_losses(self) -> int:
        """Number of these losses that came before the current micro-step."""
        return self._window.losses_before

    @property
    def is_open(self) -> bool:
        """True if a window has begun and its update has not been made: a save stores the state at its beginning."""
        window = self._window
        return (window.micro > 0 and not window.closed) or (
            window.losses > 0 and self._has_unused_gradients()
        )

    @property
    def may_clear(self) -> bool:
        """True if gradients may be set to zero now without losing any of the window's.

        False at the start of a window's last micro-step, where a loop that clears before its backward would discard the
        other micro-steps' gradients.
        """
        window = self._window
        return self.interrupted or (
            self.boundary
            and (window.losses_before == 0 or window.losses > window.losses_before)
        )

    @property
    def shares_open_window(self) -> bool:
        """True if several optimizers share windows of several micro-steps."""
        return (
            not self.has_one_optimizer
            and self._window.micro > 0
            and self._window.every > 1
        )

    @property
    def shared(self) -> bool:
        """True if several optimizers share a window that has earlier micro-steps."""
        return self.shares_open_window and self._window.losses_before > 0

    def register_optimizer(self, holder: Holder) -> None:
        """Register an optimizer with the clock."""
        holders = []
        for holder_ref in self._holders:
            if holder_ref() is not None:
                holders.append(holder_ref)
        self._holders = [*holders, weakref.ref(holder)]
        self.has_one_optimizer = len(self._holders) < 2

    def holders(self) -> Iterator[Holder]:
        """Yield the optimizers that still exist."""
        for holder_ref in self._holders:
            if (holder := holder_ref()) is not None:
                yield holder

    def refuse_plain_optimizers(self) -> None:
        """Raise StepError if no optimizer is prepared, whose step would follow the window."""
        if not self._holders:
            raise StepError(
                f"backward() was called inside accumulate() with gradient_accumulation_steps={self.every}, and no optimizer is prepared: a plain one "
                "steps in every micro-step, with gradients that are not normalised. Prepare it: "
                "model, optimizer = accelerator.prepare(model, optimizer)."
            )

    @contextmanager
    def iterate_loader(self, cursor: LoaderCursor) -> Iterator[None]:
        """Context manager in which `cursor` is the active loader, until a loader inside it starts; loaders may end out of order."""
        loaders = self.loaders
        is_exhausted = False
        cursor.passes_before = self.num_passes
        if not cursor.opened:
            loaders.record_start(cursor)
        loaders.watched.append(cursor)
        try:
            yield
            is_exhausted = True
        finally:
            loaders.record_end(
                cursor, is_exhausted, trained=self.num_passes > cursor.passes_before
            )
            for tell in self.parts.pass_ends:
                tell(cursor)

    def keep_position(self, cursor: LoaderCursor) -> None:
        """Keep the loop's position before the loader of `cursor` moves, if the next micro-step opens a window of several."""
        if self.every == 1 or self.read_position is None or self.is_open:
            return
        if self.position is None or not self.loaders.has_moved_since(
            self._position_time, besides=cursor
        ):
            self._position_time = self.loaders.num_moves
            self.position = self.read_position()

    def tick(self, models: Sequence[object] = ()) -> bool:
        """Start a micro-step of these models; return True if it is the window's last.

        A change of `every` takes effect with the next window. Raises: StepError inside a window of other models.
        """
        window = self._window
        # 0: its first micro-step was rolled back
        if window.closed or window.micro == 0:
            if (
                self.position is None
                and self.every > 1
                and self.read_position is not None
            ):
                self.position = self.read_position()
            window = self._open_window()
            window.models = models
        elif (
            window.models is not models
            and window.models != models
            and self.checks_models
        ):
            _refuse_other_models(window, models)
        window.micro += 1
        window.losses_before = window.losses
        window.turn = 0
        self.interrupted = False
        at_end = self.loaders.tick(window.micro > 1)
        window.closed = self.boundary = window.micro >= window.every or (
            at_end and self.sync_with_dataloader
        )
        self.needs_correction = self.boundary and self.would_need_correction()
        return self.boundary

    def begin_at(self, micro: int) -> None:
        """Let the next micro-step follow `micro` others of its window, however many there were."""
        window = self._open_window() if self._window.closed else self._window
        window.micro = micro

    def roll_back_micro_step(self) -> None:
        """Roll back a micro-step that ended with an error; its window continues without it."""
        window = self._window
        window.micro -= 1
        window.closed = self.needs_correction = False
        window.losses = window.losses_before
        self.interrupted = True

    def drop_accumulated(self) -> None:
        """Record that gradients accumulated before an interruption were cleared; the window continues without them."""
        window = self._window
        window.missing = window.micro
        window.losses = window.losses_before = 0
        window.weights = []
        window.weighted = None
        self.interrupted = False

    def weigh(self, loss: Tensor, weight: Number | None = None) -> tuple[Tensor, int]:
        """Return the loss to backpropagate, multiplied by its share of the weight, and the remaining divisor.

        Raises: StepError when weighted and unweighted losses are mixed in one window.
        """
        window = self._window
        # no accumulate(): an optimizer has used the last window
        if window.closed and window.micro == 0:
            # the hot path: plain windows have equal settings
            if weight is None and window.weighted is False:
                window.closed = False
                window.every = self.every
            else:
                waiting = window.losses
                window = self._open_window()
                window.losses = waiting
                self.needs_correction = False
        # nothing was divided by an earlier length
        elif window.micro == window.losses == 0:
            window.every = self.every
        if window.weighted is None:
            window.weighted = weight is not None
        elif window.weighted is (weight is None):
            raise StepError(
                "backward() got losses with and without weight= in one accumulation window; their gradients have no "
                "common denominator. Give every backward() of a window a weight, or none."
            )
        window.losses += 1
        weights = self.weights
        if weights.idle:
            loss, weight = (loss * 0, None) if weight is None else (loss, weight * 0)
        if weight is None:
            if weights.share is not None:
                loss = loss * weights.share
            return loss, window.every
        share = weights.weigh(window, loss, weight, self.boundary, list(self.holders()))
        self.needs_correction = self.boundary
        return share, 1

    def correction(self) -> float | Tensor | None:
        """Return the factor for the current window's gradients before they are used; None for no correction.

        Ranks: every rank of the loss axes, because a weighted window agrees on its total weight here (once).
        """
        window = self._window
        if window.weighted:
            return self.weights.correction(window)
        length = window.micro - window.missing
        complete = window.micro == 0 or self.full_divisor or length in (0, window.every)
        return None if complete else window.every / length

    def window_weights(self) -> list[float] | None:
        """Return the total weight of each loss of the current window on this rank; None for losses without weights."""
        window = self._window
        return [float(weight) for weight in window.weights] if window.weighted else None

    def force_boundary(self, boundary: bool) -> None:
        """Make the current micro-step a boundary or not, regardless of the count."""
        window = self._window
        self.boundary = boundary
        if window.micro > 0:
            window.closed = boundary
        self.needs_correction = boundary and self.would_need_correction()

    def would_need_correction(self) -> bool:
        """Return True if the current window, if it ended here, would need a correction."""
        window = self._window
        if window.weighted or self.full_divisor:
            return bool(window.weighted)
        return window.micro > 0 and window.micro - window.missing != window.every

    def record_update(self) -> None:
        """Record that an optimizer has used the current gradients: without accumulate(), the window ends here.

        Its losses stay in flight while another optimizer holds their gradients.
        """
        window = self._window
        window.closed = True
        self.num_updates += 1
        self.position = None
        if self.has_one_optimizer or not self._has_unused_gradients():
            window.losses = window.losses_before = 0

    def _has_unused_gradients(self) -> bool:
        """Return True if an active optimizer has gradients it has not used."""
        return any(
            not holder.spent
            and self.num_updates - holder.called_at < _RECENT
            and (
                not holder.readable
                or any(p.grad is not None for p in holder.parameters)
            )
            for holder in self.holders()
        )

    def start_new_window(self) -> None:
        """Forget the current window: the next micro-step opens a new one."""
        self._open_window()
        self.boundary = True
        self.needs_correction = False
        self.interrupted = False
        self.position = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state that outlives a window as plain JSON values."""
        return {"unit": self.weights.unit}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state, at the beginning of a window."""
        unit = state["unit"]
        self.weights.unit = None if unit is None else float(unit)
        self.start_new_window()

    def _open_window(self) -> Window:
        self._window = Window(self.every, self._window.serial + 1)
        return self._window


def _refuse_other_models(window: Window, models: Sequence[object]) -> None:
    first, second = (
        " and ".join(type(model).__name__ for model in group)
        for group in (window.models, models)
    )
    raise StepError(
        f"accumulate() was entered for {second} in the middle of an accumulation window of {first}: an Accelerator has one window, which counts "
        f"the micro-steps of all its models. Use one block for both in every micro-step, accumulate(first, second)."
    )


def check_every(every: object) -> None:
    """Raise ConfigError unless `every` is a valid window length."""
    if (
        not isinstance(every, int)
        or isinstance(every, bool)
        or not 1 <= every <= MAX_MICRO_STEPS
    ):
        raise ConfigError(
            f"gradient_accumulation_steps={every!r} is not a whole number of at least 1 and at most {MAX_MICRO_STEPS}; a window of that "
            f"length never ends. Set it to 1 to update after every backward()."
        )
