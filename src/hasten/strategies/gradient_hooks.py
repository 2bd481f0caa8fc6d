"""Gradient hooks on parameters, which sharding would silently drop: they are carried over, or refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hasten.errors import PrepareError

Hooks = dict[str, list[Callable[..., Any]]]  # Any: the user's functions


def refuse_gradient_hooks(model: nn.Module, whole: set[nn.Parameter]) -> None:
    """Raise if a parameter to be sharded has a hook set with `register_hook`, which would never be called."""
    for name, parameter in model.named_parameters():
        if parameter not in whole and getattr(parameter, "_backward_hooks", None):
            raise _never_called(
                f"{name!r} has a hook set with register_hook()", "which is carried over"
            )


def refuse_later_hooks(model: nn.Module) -> None:
    """Make `register_hook` of the sharded parameters raise."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            parameter.register_hook = partial(_refused, ref(parameter))  # type: ignore[method-assign]  # only on this instance


# Any: torch's handle
def _refused(parameter: ref[Tensor], hook: Callable[..., Any]) -> Any:
    owner = parameter()
    # torch's memory tracker only reads gradients
    if getattr(hook, "__module__", "").startswith("torch.") and owner is not None:
        return Tensor.register_hook(owner, hook)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    raise _never_called(
        f"register_hook({getattr(hook, '__qualname__', hook)}) was called on a sharded parameter",
        "which is called",
    )


def _never_called(happened: str, better: str) -> PrepareError:
    return PrepareError(
        f"{happened}, which torch never calls on a sharded parameter, so its effect on the gradient would be lost. "
        f"Change the gradient in a hook set with register_post_accumulate_grad_hook(), {better}, or between backward() "
        "and step()."
    )


def hooks_to_carry(model: nn.Module, whole: set[nn.Parameter]) -> Hooks:
    """Return the hooks set with `register_post_accumulate_grad_hook` on parameters to be sharded, by name."""
    found: Hooks = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        hooks = (
            None
            if parameter in whole
            else getattr(parameter, "_post_accumulate_grad_hooks", None)
        )
        if hooks:
            found[name] = list(hooks.values())
    return found


def carry_hooks(
    model: nn.Module, hooks: Mapping[str, list[Callable[..., Any]]]
) -> None:
    """Register the hooks on the shards, where they receive the averaged gradient."""
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in hooks and id(parameter) not in seen:
            seen.add(id(parameter))
            for hook in hooks[name]:
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch leaves it untyped
