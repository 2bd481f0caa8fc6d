"""Gradient hooks on parameters, which sharding would silently drop: they are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hasten.errors import PrepareError


def refuse_gradient_hooks(
    model: nn.Module, unsharded_parameters: set[nn.Parameter]
) -> None:
    """Raise if a parameter to be sharded has a gradient hook, which would never be called on its shard."""
    for parameter_name, parameter in model.named_parameters():
        if parameter in unsharded_parameters:
            continue
        if getattr(parameter, "_backward_hooks", None):
            raise _hook_error(f"{parameter_name!r} has a hook set with register_hook()")
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise _hook_error(f"{parameter_name!r} has a hook set before prepare()")


def refuse_later_hooks(model: nn.Module) -> None:
    """Make `register_hook` of the sharded parameters raise."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            parameter.register_hook = partial(_refuse_hook, ref(parameter))  # type: ignore[method-assign]  # only on this instance


# Any: torch's handle
def _refuse_hook(parameter: ref[Tensor], hook: Callable[..., Any]) -> Any:
    owner = parameter()
    # torch's memory tracker only reads gradients
    if getattr(hook, "__module__", "").startswith("torch.") and owner is not None:
        return Tensor.register_hook(owner, hook)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    raise _hook_error(
        f"register_hook({getattr(hook, '__qualname__', hook)}) was called on a sharded parameter"
    )


def _hook_error(happened: str) -> PrepareError:
    return PrepareError(
        f"{happened}, which torch never calls on a sharded parameter, so its effect on the gradient would be lost. "
        "Change the gradient in a hook set with register_post_accumulate_grad_hook() on the prepared model's parameter, or between "
        "backward() and step()."
    )
