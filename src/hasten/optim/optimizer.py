"""The prepared optimizer: an Optimizer that steps at the boundary of a window and reports the result."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from hasten.errors import StepError
from hasten.optim.clock import StepClock
from hasten.optim.engine import EngineOptimizer
from hasten.optim.gradients import gradient_versions, multiply_gradients
from hasten.precision.base import APPLIED, SKIPPED, Precision, StepResult

SETTLE_STATE: Final = "_hasten_settle_state"
"""Attribute of an optimizer whose state is in host memory: function that makes the state current and lets others change it."""


def settle_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer after its state in host memory is current, so that it can be read and changed."""
    if (settle := vars(optimizer).get(SETTLE_STATE)) is not None:
        settle()
    return optimizer


class PreparedOptimizer(torch.optim.Optimizer):
    """Wrapper of the user's optimizer that steps and clears gradients only when an accumulation window ends.

    Groups, state, hooks and options are those of the inner optimizer.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, clock: StepClock, precision: Precision
    ) -> None:
        # Optimizer.__init__ is not called: it would build separate groups and hooks beside the inner optimizer's.
        self.optimizer = inner
        self.last: StepResult | None = None
        """Result of the latest step; None when the latest call was off the boundary."""
        self.skipped = False
        """True if the latest step on a boundary was skipped."""
        self.num_attempts = 0
        """Number of calls of `step` at a boundary."""
        self.num_updates = 0
        """Number of steps that were not skipped."""
        self._clock = clock
        self._precision = precision
        self._scaled = precision.scaler is not None
        self._engine = inner if isinstance(inner, EngineOptimizer) else None
        self._seen_gradients: object = None
        """The gradients when step() was called before the window's end, to find those that arrive until zero_grad()."""
        self.spent = False
        """True if the gradients were used and not cleared since."""
        self.called_at = clock.num_updates
        """The clock's number of updates when `step` or `zero_grad` was last called."""
        self._settled = 0
        clock.register_optimizer(self)

    # -- attributes of the inner optimizer ------------------------------------------------------------------------
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # Any: of any type
        settle_state(self.optimizer)
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def __getattr__(self, name: str) -> Any:  # Any: attributes of the inner optimizer
        if name == "optimizer":  # absent while unpickling or copying
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Switch an optimizer with two sets of weights (schedule-free) to the training weights."""
        if callable(switch := getattr(self.optimizer, "train", None)):
            switch()

    def eval(self) -> None:
        """Switch an optimizer with two sets of weights (schedule-free) to the evaluation weights."""
        if callable(switch := getattr(self.optimizer, "eval", None)):
            switch()

    # -- one update -----------------------------------------------------------------------------------------------
    @property
    def step_was_skipped(self) -> bool:
        """True if the latest step was skipped because gradients overflowed or were not finite."""
        return self.last is not None and not self.last.applied

    @property
    def untouched(self) -> bool:
        """True if training has not started: no step was attempted and no backward has run."""
        return (
            self.num_attempts == 0
            and self._clock.boundary
            and self._clock.in_flight == 0
        )

    @property
    def acts_now(self) -> bool:
        """True if the current micro-step ends its window."""
        return self._clock.boundary

    # Any: the inner optimizer's result
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters if the window ends here; return the inner optimizer's result.

        Ranks: every rank, as for the backward before it.
        """
        clock = self._clock
        self.called_at = clock.num_updates
        if not clock.boundary:
            self.last = None
            if not clock.has_one_optimizer and clock.shares_open_window:
                self._seen_gradients = self._gradient_versions()
            return None
        if closure is not None:
            step_output = self._step_with(closure)
        else:
            if clock.needs_correction:
                self.settle()
            run_parts = clock.parts
            for changes_or_skips in (*run_parts.gradients, *run_parts.before_update):
                if changes_or_skips(self):
                    self._end_window(SKIPPED)
                    return None
            if self._scaled or self._engine is not None:
                return self._step_reported()
            try:
                step_output = self.optimizer.step()
            except (RuntimeError, NotImplementedError) as error:
                self._explain_error(error)
                raise
        self._end_window(APPLIED)
        return step_output

    def _end_window(self, result: StepResult) -> None:
        """Count the update, and end the window."""
        self.last = result
        self.skipped = not result.applied
        self.num_attempts += 1
        self.num_updates += result.applied
        self.spent = True
        clock = self._clock
        clock.record_update()
        for tell in clock.parts.after_update:
            tell(self, result.applied)

    def record_replay(self) -> None:
        """Count an update that a CUDA graph has made, including clearing the gradients."""
        clock = self._clock
        self.called_at = clock.num_updates
        for tell in clock.parts.before_update:
            tell(self)
        self._end_window(APPLIED)
        self.spent = False

    def update_counts(self) -> tuple[StepResult | None, int, int, int, bool]:
        """Return the host-side counters of updates."""
        return (
            self.last,
            self.num_attempts,
            self.num_updates,
            self.called_at,
            self.spent,
        )

    def restore_counts(
        self, counts: tuple[StepResult | None, int, int, int, bool]
    ) -> None:
        """Restore the counters."""
        self.last, self.num_attempts, self.num_updates, self.called_at, self.spent = (
            counts
        )
        self.skipped = self.step_was_skipped

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless an open window needs them."""
        clock = self._clock
        self.called_at = clock.num_updates
        if clock.has_one_optimizer and not (
            self.spent or clock.boundary or clock.interrupted
        ):
            return  # the common case: the window is open
        if self.spent or clock.interrupted or (clock.may_clear and not clock.shared):
            self._clear(set_to_none)
            if clock.interrupted:
                clock.drop_accumulated()
        elif clock.shares_open_window:
            self._refuse_lost_gradients()

    def _gradient_versions(self) -> object:
        """Return a value that changes when a backward reaches these parameters."""
        if self._engine is None:
            return gradient_versions(self.parameters)
        return self._engine.num_passes

    def _refuse_lost_gradients(self) -> None:
        """Raise StepError if zero_grad() would have to clear the gradients of one loss and keep those of earlier micro-steps."""
        clock = self._clock
        seen_gradients = self._seen_gradients
        self._seen_gradients = None
        if seen_gradients is None:
            is_late = (
                clock.boundary
                and clock.shared
                and clock.in_flight > clock.num_earlier_losses
            )
        else:
            is_late = not _are_same(seen_gradients, self._gradient_versions())
        if is_late:
            raise StepError(
                f"{type(self.optimizer).__name__}.zero_grad() would have to clear gradients that arrived outside of its backward() and step(), and "
                "keep those of the window's earlier micro-steps, to which they are added already. Call requires_grad_(False) on its model during "
                "the other optimizer's loss, call step() and zero_grad() in every micro-step, or set gradient_accumulation_steps=1."
            )

    def _clear(self, set_to_none: bool) -> None:
        self.spent = False
        self._seen_gradients = None
        clear = self.optimizer.zero_grad
        is_torchs = getattr(clear, "__func__", None) is torch.optim.Optimizer.zero_grad
        if set_to_none and is_torchs:
            # same effect, without the profiler mark, which costs more than the rest
            for param_group in self.optimizer.param_groups:
                for parameter in param_group["params"]:
                    parameter.grad = None
        elif is_torchs or inspect.signature(clear).parameters:
            clear(set_to_none)
        else:  # a class of the user's that takes no argument
            clear()

    @property
    def scaled(self) -> bool:
        """True if losses are scaled, so that gradients may overflow and the scaler handles it."""
        return self._scaled

    @property
    def readable(self) -> bool:
        """True if gradients are in the parameters' .grad, not in an engine."""
        return self._engine is None

    # -- interface for the clock ----------------------------------------------------------------------------------
    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of all groups."""
        parameters: list[Tensor] = []
        for param_group in self.optimizer.param_groups:
            parameters += param_group["params"]
        return parameters

    def settled_in(self, serial: int) -> bool:
        """Return True if the gradients are unscaled and normalised for this window."""
        return self._settled == serial

    @property
    def needs_settling(self) -> bool:
        """True if the gradients may need unscaling or normalising: the loss is scaled, or a correction is pending."""
        return (
            self._scaled
            or self._clock.needs_correction
            or bool(self._clock.parts.gradients)
        )

    def settle(self) -> None:
        """Unscale and normalise the gradients before they are read or used; a second call does nothing.

        Ranks: every rank.
        """
        clock = self._clock
        is_due = clock.needs_correction and self._settled != clock.serial
        if is_due:
            self._settled = clock.serial
        if self._scaled:
            self._refuse_unscaled_gradients()
            self._precision.unscale(self.optimizer)
        if is_due and (factor := clock.correction()) is not None:
            if self._engine is None:
                multiply_gradients(self.optimizer.param_groups, factor)
            else:
                self._engine.multiply_gradients(factor)
        if clock.boundary:
            for change in clock.parts.gradients:
                change(self)

    def _explain_error(self, error: Exception) -> None:
        """Raise a StepError in place of torch's error about an operation that sharded tensors do not support."""
        # only sharded tensors have it
        is_sharded = any(
            hasattr(parameter, "to_local") for parameter in self.parameters
        )
        if is_sharded and any(
            word in str(error)
            for word in ("DTensor", "Sharding propagation", "sharding strategy")
        ):
            first_line = str(error).splitlines()[0]
            raise StepError(
                f"{type(self.optimizer).__name__} cannot update sharded parameters: it uses an operation that torch's "
                f"sharded tensors do not have ({first_line}). Use an optimizer of torch that updates each element by "
                "itself, such as AdamW, or strategy='ddp'."
            ) from error

    def _refuse_unscaled_gradients(self) -> None:
        """Raise StepError for the gradients of a plain loss.backward() under fp16."""
        if (
            self._clock.in_flight
            or self.spent
            or not any(p.grad is not None for p in self.parameters)
        ):
            return
        raise StepError(
            f"{type(self.optimizer).__name__} has gradients of a loss that was not scaled, as mixed_precision='fp16' needs; dividing them by the scale "
            "would make them vanish. Call accelerator.backward(loss) instead of loss.backward()."
        )

    def _step_reported(self) -> Any:
        if self._scaled:
            self._refuse_unscaled_gradients()
        try:
            engine = self._engine
            if engine is None:
                result = self._precision.step(self.optimizer)
            else:
                result = engine.apply()
        except (RuntimeError, NotImplementedError) as error:
            self._explain_error(error)
            raise
        self._end_window(result)
        return result.value

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        name = type(self.optimizer).__name__
        if self._engine is not None:
            raise StepError(
                f"{name}.step(closure) cannot run in an engine, which takes its gradients from backward() alone; the closure's "
                "would be lost. Call backward() and step() instead."
            )
        if self._scaled:
            raise StepError(
                f"{name}.step(closure) cannot run under mixed_precision='fp16': the closure computes gradients inside "
                "the step, where they can be neither unscaled nor skipped. Use 'bf16' or 'no'."
            )
        if self._clock.parts.gradients:
            raise StepError(
                f"{name}.step(closure) computes its gradients inside the step, where {self._clock.parts.names('gradients')} cannot change them. Use an "
                "optimizer without a closure."
            )
        if self._clock.every > 1:
            raise StepError(
                f"{name}.step(closure) computes its gradients from one batch, but gradient_accumulation_steps="
                f"{self._clock.every}; the other micro-steps would be lost. Set it to 1, or loop over the "
                "micro-batches inside the closure."
            )
        value = self.optimizer.step(closure)
        if self._clock.needs_correction:
            raise StepError(
                f"{name}.step(closure) used backward(weight=...); the weight is settled after the closure, too late "
                "for the step. Divide the loss by its total weight inside the closure instead."
            )
        return value


def _are_same(first: object, second: object) -> bool:
    """Compare two results of `_gradient_versions`."""
    if not isinstance(first, list) or not isinstance(second, list):
        return first == second
    if len(first) != len(second):
        return False
    return all(a is b and m == n for (a, m), (b, n) in zip(first, second, strict=True))


def settle_optimizers(
    parameters: Sequence[Tensor], optimizers: Iterable[PreparedOptimizer]
) -> None:
    """Settle every optimizer that owns one of `parameters`, before their gradients are read or clipped.

    Ranks: every rank.
    """
    due_optimizers = [optimizer for optimizer in optimizers if optimizer.needs_settling]
    parameter_ids = {id(p) for p in parameters} if due_optimizers else ()
    for optimizer in due_optimizers:
        if any(
            id(p) in parameter_ids
            for param_group in optimizer.param_groups
            for p in param_group["params"]
        ):
            optimizer.settle()


def refuse_unowned(
    parameters: Sequence[Tensor], optimizers: Sequence[PreparedOptimizer]
) -> None:
    """Raise StepError if one of `parameters` is trained, and no optimizer holds it."""
    owned_ids = {
        id(parameter) for optimizer in optimizers for parameter in optimizer.parameters
    }
    num_unowned = sum(
        parameter.requires_grad and id(parameter) not in owned_ids
        for parameter in parameters
    )
    if num_unowned:
        raise StepError(
            f"{num_unowned} of the clipped parameters are trained and in no prepared optimizer, so their gradients lack the divisor of the window, or "
            "the scale of fp16, that the others get. Clip the parameters of the optimizer, or call requires_grad_(False) on the rest."
        )
