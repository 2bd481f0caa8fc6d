"""Mixed precision by autocast around a model's forward, with loss scaling for fp16."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from hasten.config.sections.loop import AutocastKwargs, PrecisionType
from hasten.errors import PrecisionError
from hasten.modules import forwarding
from hasten.precision.base import StepResult
from hasten.precision.scaler import LossScaler
from hasten.trees import to_fp32

_HALF_DTYPES = (torch.float16, torch.bfloat16)


class AutocastForward(forwarding.Forward):
    """Forward under autocast, whose half-precision outputs are converted to float32 unless `keep_outputs` is set."""

    tag = "autocast"

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype,
        cache: bool | None,
        keep_outputs: bool,
    ) -> None:
        self.device_type = device_type
        self.dtype = dtype
        self.cache = cache
        self.keep_outputs = keep_outputs

    # Any: the user's arguments and outputs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            with torch.autocast(self.device_type, self.dtype, cache_enabled=self.cache):
                outputs = self.inner(*args, **kwargs)
        else:
            outputs = self._call_eagerly(args, kwargs)
        if self.keep_outputs:
            return outputs
        if type(outputs) is Tensor:  # the common case, on the hot path
            if outputs.dtype in _HALF_DTYPES:
                return outputs.float()
            return outputs
        return to_fp32(outputs)

    def _call_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the forward with autocast set directly: a third of the context manager's cost, safe with nesting and threads."""
        device_type = self.device_type
        was_enabled = torch.is_autocast_enabled(device_type)
        previous_dtype = torch.get_autocast_dtype(device_type)
        cached_before = torch.is_autocast_cache_enabled()
        torch.set_autocast_enabled(device_type, True)
        torch.set_autocast_dtype(device_type, self.dtype)
        torch.autocast_increment_nesting()
        if self.cache is not None:
            torch.set_autocast_cache_enabled(self.cache)
        try:
            return self.inner(*args, **kwargs)
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            torch.set_autocast_enabled(device_type, was_enabled)
            torch.set_autocast_dtype(device_type, previous_dtype)
            torch.set_autocast_cache_enabled(cached_before)


class AutocastPrecision:
    """bf16 or fp16 compute with float32 weights; fp16 with a loss scaler."""

    takes_half_weights = False

    def __init__(
        self,
        spec: PrecisionType,
        device: torch.device,
        dtype: torch.dtype,
        kwargs: AutocastKwargs,
        scaler: LossScaler | None = None,
        in_flight: Callable[[], int] | None = None,
    ) -> None:
        self.spec = spec
        self.scaler = scaler
        self.dtype = dtype
        self._device_type = device.type
        self._kwargs = kwargs
        self._in_flight = in_flight or (lambda: 0)
        if scaler is not None:
            scaler.in_flight = self._in_flight

    def convert(self, model: nn.Module) -> nn.Module:
        if self.scaler is not None and not self.takes_half_weights:
            refuse_half_weights(model)
        if self._kwargs.enabled and forwarding.find(model, AutocastForward.tag) is None:
            keep_outputs = self._kwargs.output_dtype == "keep"
            forwarding.replace(
                model,
                AutocastForward(
                    self._device_type,
                    self.dtype,
                    self._kwargs.cache_enabled,
                    keep_outputs,
                ),
            )
        return model

    def restore(self, model: nn.Module) -> nn.Module:
        forwarding.restore(model, AutocastForward.tag)
        return model

    def forward_context(
        self, kwargs: AutocastKwargs | None = None
    ) -> AbstractContextManager[None]:
        settings = kwargs or self._kwargs
        return torch.autocast(
            self._device_type,
            self.dtype,
            enabled=settings.enabled,
            cache_enabled=settings.cache_enabled,
        )

    def scale(self, loss: Tensor) -> Tensor:
        if self.scaler is None:
            return loss
        # gradients of one window must share one scale
        if self.scaler.due and self._in_flight() <= 1:
            self.scaler.update()
        return self.scaler.scale(loss.float() if loss.dtype in _HALF_DTYPES else loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> StepResult:
        if self.scaler is None:
            return StepResult(applied=True, value=optimizer.step())
        return self.scaler.step_if_finite(optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.scaler is not None:
            self.scaler.load_state_dict(state)


def refuse_half_weights(model: nn.Module) -> None:
    """Raise if the model trains float16 weights, whose updates a loss scaler cannot protect."""
    half_parameters = []
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            half_parameters.append(parameter_name)
    if half_parameters:
        if len(half_parameters) == 1:
            remaining = ""
        else:
            remaining = f" and {len(half_parameters) - 1} more"
        raise PrecisionError(
            f"parameter {half_parameters[0]!r}{remaining} is float16 and trainable; under fp16 the weights stay float32 and only the "
            f"compute is cast, because small updates vanish in float16. Call model.float() before prepare(), freeze "
            f"the parameter, or use mixed_precision='bf16'."
        )
