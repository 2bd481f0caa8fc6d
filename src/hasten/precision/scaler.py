"""Dynamic loss scaling whose overflow is agreed on by all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from hasten.comm.base import Comm
from hasten.config.precision import GradScalerKwargs
from hasten.precision.base import StepResult


class LossScaler(torch.amp.GradScaler):
    """torch's GradScaler, stepping on all ranks or on none.

    The scale changes at the next backward rather than inside a step, so that two optimizers whose losses were scaled
    together are unscaled by the same number.
    """

    def __init__(self, device: torch.device, kwargs: GradScalerKwargs, comm: Comm | None = None) -> None:
        super().__init__(
            device.type,
            init_scale=kwargs.init_scale,
            growth_factor=kwargs.growth_factor,
            backoff_factor=kwargs.backoff_factor,
            growth_interval=kwargs.growth_interval,
            enabled=kwargs.enabled,
        )
        self.due = False
        """A step was decided since the last update."""
        self._comm = comm if comm is not None and comm.size > 1 else None
        self._overflowed = False
        self._good_steps = 0
        self._known_scale = float(kwargs.init_scale) if kwargs.enabled else 1.0
        self._stepped = 0

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, once per step.

        Ranks: every rank; the overflow is agreed on here.
        """
        if not self._enabled or self._stage(optimizer) is not OptState.READY:
            return
        if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            super().unscale_(optimizer)
        self._agree(optimizer)

    def step_if_finite(self, optimizer: torch.optim.Optimizer) -> StepResult:
        """Step the optimizer unless a gradient overflowed on some rank.

        Ranks: every rank.
        """
        if not self._enabled:
            return StepResult(applied=True, value=optimizer.step())
        self.unscale_(optimizer)
        found = self._verdicts(optimizer)
        overflow = any(flag.item() for flag in found.values())
        value = None if overflow else optimizer.step()
        self._set_aside(optimizer)
        self._overflowed |= overflow
        self.due = True
        return StepResult(applied=not overflow, scale=self._known_scale, value=value)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Move the scale: down after an overflow, up after enough steps without one."""
        self.due = False
        seen = any(state["found_inf_per_device"] for state in self._per_optimizer_states.values())
        if not self._enabled or (new_scale is None and not seen):
            return
        super().update(new_scale)
        self._good_steps = 0 if self._overflowed or new_scale is not None else self._good_steps + 1
        if self._overflowed or new_scale is not None or self._good_steps >= self._growth_interval:
            self._known_scale, self._good_steps = self.get_scale(), self._get_growth_tracker()
        self._overflowed = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved scale."""
        super().load_state_dict(state_dict)
        if self._enabled:
            self._known_scale, self._good_steps = float(state_dict["scale"]), int(state_dict["_growth_tracker"])
        self._per_optimizer_states.clear()
        self._overflowed = self.due = False

    def _stage(self, optimizer: torch.optim.Optimizer) -> OptState:
        stage: OptState = self._per_optimizer_states[id(optimizer)]["stage"]
        return stage

    def _verdicts(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, torch.Tensor]:
        found: dict[torch.device, torch.Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return found

    def _agree(self, optimizer: torch.optim.Optimizer) -> None:
        """Make every rank see an overflow that any rank saw; a rank without gradients joins with none."""
        found = self._verdicts(optimizer)
        if self._comm is None:
            return
        flags = list(found.values())
        worst = torch.stack([flag.to(self._comm.device) for flag in flags]).max() if flags else torch.zeros(())
        agreed = self._comm.all_reduce(worst.to(self._comm.device), "max")
        if not flags:
            found[self._comm.device] = agreed.reshape(1)
            self._per_optimizer_states[id(optimizer)]["stage"] = OptState.UNSCALED
        for flag in flags:
            flag.copy_(agreed)

    def _set_aside(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep the optimizer's verdict for the next update, and let its next window begin afresh."""
        state = self._per_optimizer_states.pop(id(optimizer))
        if state["found_inf_per_device"]:
            self._stepped += 1
            self._per_optimizer_states[-self._stepped] = state
