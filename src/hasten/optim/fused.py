"""Fused optimizers: one kernel for all parameters, where torch provides it."""

from __future__ import annotations

from typing import Final

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

_KINDS: Final = (Adam, AdamW, SGD)
"""Optimizers whose fused form updates as the plain one does, except for rounding."""


def refusal(optimizer: Optimizer) -> str:
    """Return the reason why an optimizer cannot be made fused; empty when it can, or is already."""
    if type(optimizer) not in _KINDS:
        return f"torch has no fused {type(optimizer).__name__}"
    for group in optimizer.param_groups:
        if group.get("fused"):
            continue
        if group.get("fused") is False:
            return "fused=False was given"
        if group.get("foreach") or group.get("differentiable"):
            return f"{'foreach' if group.get('foreach') else 'differentiable'}=True was given"
        other = next((p for p in group["params"] if p.device.type != "cuda" or not p.is_floating_point()), None)
        if other is not None:
            return f"it updates parameters on {other.device.type} as {other.dtype}"
    return ""


def is_fused(optimizer: Optimizer) -> bool:
    """Return True if every group of an optimizer is updated by a fused kernel."""
    return all(group.get("fused") for group in optimizer.param_groups)


def fuse(optimizer: Optimizer) -> None:
    """Make an optimizer fused; `refusal` must have returned an empty string for it."""
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
        for parameter in group["params"]:
            step = optimizer.state.get(parameter, {}).get("step")
            if isinstance(step, torch.Tensor) and step.device != parameter.device:  # the kernel reads it on the device
                optimizer.state[parameter]["step"] = step.to(parameter.device, torch.float32)
