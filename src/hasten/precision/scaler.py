"""Dynamic loss scaling in which all ranks agree on an overflow."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from hasten.comm.base import Comm
from hasten.config.sections.loop import GradScalerKwargs
from hasten.errors import HastenWarning, LossScaleError, PrecisionError
from hasten.precision.base import StepResult

_WARN_AFTER_SKIPPED_UPDATES: Final = 8
"""Number of consecutive skipped updates before a warning: more than in an ordinary start."""


class LossScaler(torch.amp.GradScaler):
    """torch's GradScaler, which steps on all ranks or on none.

    The scale changes at the next backward, or when it is read, rather than inside a step, so that two optimizers whose
    losses were scaled together are unscaled by the same number.
    """

    in_flight: Callable[[], int] = staticmethod(int)
    """Returns the number of losses whose gradients no optimizer has used yet; meanwhile the scale does not change."""

    def __init__(
        self, device: torch.device, kwargs: GradScalerKwargs, comm: Comm | None = None
    ) -> None:
        super().__init__(
            device.type,
            init_scale=kwargs.init_scale,
            growth_factor=kwargs.growth_factor,
            backoff_factor=kwargs.backoff_factor,
            growth_interval=kwargs.growth_interval,
            enabled=kwargs.enabled,
        )
        self.due = False
        """True if a step was taken or skipped since the last update."""
        self._comm = comm if comm is not None and comm.size > 1 else None
        self._overflowed = False
        self._good_steps = 0
        if kwargs.enabled:
            self._known_scale = float(kwargs.init_scale)
        else:
            self._known_scale = 1.0
        self._stored_steps = 0
        self._max_skipped = kwargs.max_skipped_steps
        self._skipped_updates = 0
        """Number of consecutive skipped updates; several optimizers that step at one scale count once."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, once per step.

        Ranks: every rank; they agree on the overflow here.
        """
        if not self._enabled or self._optimizer_stage(optimizer) is not OptState.READY:
            return
        for param_group in optimizer.param_groups:
            if any(parameter.grad is not None for parameter in param_group["params"]):
                super().unscale_(optimizer)
                break
        self._share_overflow(optimizer)

    def step_if_finite(self, optimizer: torch.optim.Optimizer) -> StepResult:
        """Step the optimizer unless a gradient overflowed on any rank.

        Ranks: every rank.
        """
        if not self._enabled:
            return StepResult(applied=True, value=optimizer.step())
        self.unscale_(optimizer)
        overflow_flags = self._overflow_flags(optimizer)
        has_overflow = any(flag.item() for flag in overflow_flags.values())
        step_value = None if has_overflow else optimizer.step()
        self._store_overflow_flags(optimizer)
        self._overflowed |= has_overflow
        self.due = True
        return StepResult(
            applied=not has_overflow, scale=self._known_scale, value=step_value
        )

    def __getstate__(self) -> dict[str, Any]:
        scaler_state = {}
        for name, value in super().__getstate__().items():
            if name != "in_flight":
                scaler_state[name] = value
        return scaler_state

    def get_scale(self) -> float:
        """Return the scale as the latest step has left it; waits for the device."""
        self._update_if_due()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its counter as the latest step has left them; waits for the device."""
        self._update_if_due()
        return super().state_dict()

    def _update_if_due(self) -> None:
        if self.due and not self.in_flight():
            self.update()

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adjust the scale: down after an overflow, up after enough steps without one."""
        self.due = False
        has_checked_gradients = any(
            state["found_inf_per_device"]
            for state in self._per_optimizer_states.values()
        )
        if not self._enabled or (new_scale is None and not has_checked_gradients):
            return
        super().update(new_scale)
        if self._overflowed and new_scale is None:
            self._skipped_updates = self._skipped_updates + 1
        else:
            self._skipped_updates = 0
        if self._overflowed or new_scale is not None:
            self._good_steps = 0
        else:
            self._good_steps = self._good_steps + 1
        if (
            self._overflowed
            or new_scale is not None
            or self._good_steps >= self._growth_interval
        ):
            self._known_scale, self._good_steps = (
                self.get_scale(),
                self._get_growth_tracker(),
            )
        self._overflowed = False
        self._check_skipped_updates()

    def _check_skipped_updates(self) -> None:
        """Warn about consecutive skipped updates, and raise if no scale will help. The same on all ranks.

        Raises: LossScaleError after the allowed number of skipped updates, or if the scale has reached zero.
        """
        if self._skipped_updates == _WARN_AFTER_SKIPPED_UPDATES:
            warnings.warn(
                f"fp16: the last {_WARN_AFTER_SKIPPED_UPDATES} updates were skipped because gradients were inf or nan; the loss scale is "
                f"down to {self._known_scale:g}. A few skips at the start are normal; if they go on, the loss itself "
                "is not finite.",
                HastenWarning,
                stacklevel=2,
            )
        scale_is_zero = self._known_scale < torch.finfo(torch.float32).tiny
        if scale_is_zero or (
            self._max_skipped is not None and self._skipped_updates >= self._max_skipped
        ):
            if scale_is_zero:
                limit_words = "has run out"
            else:
                limit_words = f"reached scaler.max_skipped_steps={self._max_skipped}"
            raise LossScaleError(
                f"fp16: {self._skipped_updates} updates in a row were skipped because gradients were inf or nan ({limit_words}); the "
                f"loss scale is {self._known_scale:g}, so that scaling is not the cause and no parameter has changed "
                "since. Look for nan or inf in the loss and the data of one batch, lower the learning rate, or use "
                "mixed_precision='bf16'."
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a saved scale."""
        super().load_state_dict(state_dict)
        if self._enabled:
            self._known_scale = float(state_dict["scale"])
            self._good_steps = int(state_dict["_growth_tracker"])
        self._per_optimizer_states.clear()
        self._overflowed = self.due = False
        self._skipped_updates = 0

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Unscale this rank's gradient shards; torch's method does not support shards and full tensors together."""
        overflow_flags: dict[torch.device, Tensor] = {}
        gradients_by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for gradient in _local_gradients(optimizer):
            gradients_by_kind.setdefault((gradient.device, gradient.dtype), []).append(
                gradient
            )
        with torch.no_grad():
            for (device, dtype), gradients in gradients_by_kind.items():
                if dtype == torch.float16 and not allow_fp16:
                    raise PrecisionError(
                        f"Attempting to unscale FP16 gradients. {type(optimizer).__name__} trains float16 weights, whose gradients lose "
                        "their small values when they are unscaled. Call model.float() before prepare()."
                    )
                if device not in overflow_flags:
                    overflow_flags[device] = found_inf.to(device, copy=True)
                nonempty_gradients = [
                    gradient for gradient in gradients if gradient.numel()
                ]  # a rank may hold no row of a small parameter
                if nonempty_gradients:
                    torch._amp_foreach_non_finite_check_and_unscale_(
                        nonempty_gradients,
                        overflow_flags[device],
                        inv_scale.to(device, non_blocking=True),
                    )
        return overflow_flags

    def _optimizer_stage(self, optimizer: torch.optim.Optimizer) -> OptState:
        stage: OptState = self._per_optimizer_states[id(optimizer)]["stage"]
        return stage

    def _overflow_flags(
        self, optimizer: torch.optim.Optimizer
    ) -> dict[torch.device, torch.Tensor]:
        overflow_flags: dict[torch.device, torch.Tensor] = self._per_optimizer_states[
            id(optimizer)
        ]["found_inf_per_device"]
        return overflow_flags

    def _share_overflow(self, optimizer: torch.optim.Optimizer) -> None:
        """Share an overflow on any rank with every rank; a rank without gradients contributes no overflow."""
        overflow_flags = self._overflow_flags(optimizer)
        if self._comm is None:
            return
        flags = list(overflow_flags.values())
        if flags:
            largest_flag = torch.stack(
                [flag.to(self._comm.device) for flag in flags]
            ).max()
        else:
            largest_flag = torch.zeros(())
        shared_flag = self._comm.all_reduce(largest_flag.to(self._comm.device), "max")
        if not flags:
            overflow_flags[self._comm.device] = shared_flag.reshape(1)
            self._per_optimizer_states[id(optimizer)]["stage"] = OptState.UNSCALED
        for flag in flags:
            flag.copy_(shared_flag)

    def _store_overflow_flags(self, optimizer: torch.optim.Optimizer) -> None:
        """Store the optimizer's overflow flags for the next update, and reset its state for the next window."""
        state = self._per_optimizer_states.pop(id(optimizer))
        if state["found_inf_per_device"]:
            self._stored_steps += 1
            self._per_optimizer_states[-self._stored_steps] = state


def _local_gradients(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield this rank's gradient shards as dense tensors."""
    for param_group in optimizer.param_groups:
        for parameter in param_group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                # summing duplicates may overflow, so check the sums
                if gradient.dtype is torch.float16:
                    parameter.grad = gradient = gradient.coalesce()
                yield gradient._values()
            else:
                # Only DTensors have this method; their class is not imported for runs without shards.
                to_local = getattr(gradient, "to_local", None)
                yield gradient if to_local is None else to_local()
