"""Torch's own wrap policies, which FSDP1 took, as a name or a function of one module."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

# Any in this file: policies are names, functions, partial functions or torch's objects.


def as_choice(policy: Any) -> Any:
    """A policy as a name in lower case, or a function of one module; what is one already stays as it is.

    Raises: TypeError for an object that cannot be asked about one module.
    """
    if policy is None or isinstance(policy, str):
        return None if policy is None else policy.lower()
    torchs = sys.modules.get("torch.distributed.fsdp.wrap")  # whoever has a policy of torch's has imported it
    if torchs is not None:
        if policy is torchs.transformer_auto_wrap_policy:
            return "transformer_based_wrap"
        if policy is torchs.size_based_auto_wrap_policy:
            return "size_based_wrap"
        if isinstance(policy, torchs.CustomPolicy):
            return _Chosen(policy._lambda_fn)
    if not callable(policy):
        raise TypeError(f"auto_wrap_policy is a {type(policy).__name__}; give a name, or a function of a module.")
    return _Asked(policy) if "recurse" in inspect.signature(policy).parameters else policy


class _Chosen:
    """A function whose answer may be options of FSDP1 instead of a yes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, module: nn.Module) -> bool:
        return bool(self.function(module))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.function is other.function

    __hash__ = None  # type: ignore[assignment]  # compared, never a key


class _Asked(_Chosen):
    """A policy that FSDP1 would ask twice; only the second question, whether to wrap this module, is put to it."""

    def __call__(self, module: nn.Module) -> bool:
        size = sum(parameter.numel() for parameter in module.parameters())
        return bool(self.function(module=module, recurse=False, nonwrapped_numel=size))
