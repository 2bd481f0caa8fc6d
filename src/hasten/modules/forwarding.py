"""Reversible replacement of a module's forward; no other file replaces forwards.

A replaced forward is an object, not a closure: it is copied and pickled together with its module (a copied module uses
its copied weights, not the original's), has the signature of the original forward, and traces as one graph under
`torch.compile`. Replacements can be stacked; each is removed by its tag.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from torch import Tensor, nn
from torch.fx import GraphModule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FORWARD = "forward"
PLACED: Final = "placed"
"""Tag of a forward on a device of its own."""
STREAMED: Final = "streamed"
"""Tag of a forward whose weights are copied to the device just before it."""


class Forward:
    """Replacement of a module's forward; subclasses override `__call__` and call `self.inner`."""

    tag = "plain"
    inner: Callable[..., Any]
    module: nn.Module

    # Any: the user's arguments and outputs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.inner)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.inner

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if not isinstance(state["inner"], Forward) and FORWARD not in _overridden(
            self.module
        ):
            # the forward of the class: restored through the module
            state["inner"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if state["inner"] is None:
            self.__dict__["inner"] = getattr(type(self.module), FORWARD).__get__(
                self.module
            )


class GraphForward:
    """Forward of a GraphModule, which `recompile()` replaces in the class."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def __func__(self) -> Callable[..., Any]:
        forward: Callable[..., Any] = getattr(type(self.module), FORWARD)
        return forward

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        bound_forward: Callable[..., Any] = self.__func__.__get__(self.module)
        return bound_forward

    # Any: the user's arguments and outputs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.module, *args, **kwargs)


class LateHead(Forward):
    """Forward of a linear head whose logits are computed when they are used, and never all at once for a loss."""

    tag = "late head"
    gathered_by: ref[Any] | None = None  # Any: FSDP2's class of a module
    """Module whose shard group has the head's weight; it frees the weight at the end of its forward."""

    def split_logits(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup
    ) -> Tensor:
        """Return the logits of a head of which this rank holds some rows. Ranks: the group."""
        raise NotImplementedError


def _overridden(module: nn.Module) -> dict[str, Any]:
    """Return the `forward` in the module's `__dict__` before the first replacement, as a dict; empty if none."""
    original_forward: Any = module.__dict__.get(FORWARD)
    while isinstance(original_forward, Forward):
        original_forward = original_forward.inner
    is_class_forward = getattr(original_forward, "__func__", None) is getattr(
        type(module), FORWARD
    )
    if original_forward is None or is_class_forward:
        return {}
    return {FORWARD: original_forward}


def replace(module: nn.Module, forward: Forward) -> None:
    """Make `forward` the module's forward, wrapping the current one."""
    forward.module = module
    is_graph_forward = (
        isinstance(module, GraphModule) and FORWARD not in module.__dict__
    )
    forward.inner = GraphForward(module) if is_graph_forward else module.forward
    # as functools.wraps() would copy them
    for name in ("__name__", "__qualname__", "__doc__"):
        forward.__dict__[name] = getattr(forward.inner, name, "forward")
    module.__dict__[FORWARD] = forward


def find(module: nn.Module, tag: str) -> Forward | None:
    """Return the replacement with `tag` on this module itself, or None."""
    forward = module.__dict__.get(FORWARD)
    while isinstance(forward, Forward):
        if forward.tag == tag:
            return forward
        forward = forward.inner
    return None


def is_dispatched(model: nn.Module) -> bool:
    """Return whether the model is spread over several devices or streamed."""
    return find(model, PLACED) is not None or any(
        find(module, STREAMED) is not None for module in model.modules()
    )


def restore(module: nn.Module, tag: str) -> bool:
    """Remove the replacement with `tag` from this module; returns whether there was one."""
    outer_forward: Forward | None = None
    forward = module.__dict__.get(FORWARD)
    while isinstance(forward, Forward):
        if forward.tag == tag:
            if outer_forward is not None:
                outer_forward.inner = forward.inner
            else:
                _put_back(module, forward.inner)
            return True
        outer_forward = forward
        forward = forward.inner
    return False


def _put_back(module: nn.Module, forward: Callable[..., Any]) -> None:
    if getattr(forward, "__func__", None) is getattr(type(module), FORWARD):
        del module.__dict__[FORWARD]
    else:
        module.__dict__[FORWARD] = forward
