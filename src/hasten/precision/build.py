"""Factory of a Precision from its setting, which raises if the device does not support it."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

import torch

from hasten.comm.base import Comm
from hasten.config.sections.loop import (
    AutocastKwargs,
    FP8Config,
    GradScalerKwargs,
    PrecisionType,
)
from hasten.errors import PrecisionError
from hasten.precision.base import FullPrecision, Precision
from hasten.runtime.devices import kind_of


def build_precision(
    spec: PrecisionType,
    device: torch.device,
    comm: Comm | None = None,
    *,
    autocast: AutocastKwargs | None = None,
    scaler: GradScalerKwargs | None = None,
    fp8: FP8Config | None = None,
    in_flight: Callable[[], int] | None = None,
    sharded: bool = False,
    scales: bool = True,
) -> Precision:
    """Return the Precision for `spec` on `device`.

    `comm` holds the ranks that must agree on an overflow. `in_flight` counts the losses whose gradients no optimizer
    has used yet (`StepClock.in_flight`): the loss scale does not change meanwhile. `sharded` is true if parameters are
    sharded by FSDP2; `scales` is false if an engine scales losses itself.

    Raises: PrecisionError if the device does not support it, naming the supported ones.
    """
    kwargs = autocast or AutocastKwargs()
    precision: Precision
    match spec:
        case "no":
            precision = FullPrecision()
        case "bf16":
            check_autocast(spec, torch.bfloat16, device)
            # a run in full precision needs none of it
            from hasten.precision.autocast import AutocastPrecision

            precision = AutocastPrecision(spec, device, torch.bfloat16, kwargs)
        case "fp16":
            check_autocast(spec, torch.float16, device)
            from hasten.precision.autocast import AutocastPrecision  # the same
            from hasten.precision.scaler import LossScaler  # the same

            if scales:
                loss_scaler = LossScaler(device, scaler or GradScalerKwargs(), comm)
            else:
                loss_scaler = None
            precision = AutocastPrecision(
                spec, device, torch.float16, kwargs, loss_scaler, in_flight
            )
        case "fp8":
            from hasten.precision.fp8 import Fp8Precision  # the same

            precision = Fp8Precision(device, fp8 or FP8Config(), kwargs, sharded)
        case other:
            assert_never(other)
    return precision


def supported_half_precisions(device: torch.device) -> list[str]:
    """Return the half precisions that `device` supports natively, by the name of their setting."""
    setting_names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    half_precisions = []
    for dtype in kind_of(device).autocast:
        if dtype in setting_names and _can_compute_in(dtype, device):
            half_precisions.append(setting_names[dtype])
    return half_precisions


def check_autocast(spec: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise if `device` cannot compute in `dtype`."""
    if dtype in kind_of(device).autocast and _can_compute_in(dtype, device):
        return
    supported_settings = []
    for setting in [*supported_half_precisions(device), "no"]:
        if setting != spec:
            supported_settings.append(repr(setting))
    raise PrecisionError(
        f"mixed_precision={spec!r} cannot run on {device}: it has no {dtype} arithmetic, and emulating it would be "
        f"slower than float32. Use mixed_precision={' or '.join(supported_settings)} on this device."
    )


def _can_compute_in(dtype: torch.dtype, device: torch.device) -> bool:
    if not torch.amp.is_autocast_available(device.type):
        return False
    if device.type == "cuda" and dtype is torch.bfloat16:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return True
