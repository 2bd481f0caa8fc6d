"""Arithmetic on the gradients of many parameters at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from hasten.modules.names import is_dtensor
from hasten.precision.base import Precision

if TYPE_CHECKING:
    from hasten.optim.clock import StepClock
    from hasten.optim.optimizer import PreparedOptimizer


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that are there."""
    return [p.grad for p in parameters if p.grad is not None]


def versions(parameters: Iterable[Tensor]) -> list[tuple[Tensor | None, int]]:
    """Return each gradient with its version, which any write to it raises."""
    return [(p.grad, 0 if p.grad is None else _part(p.grad)._version) for p in parameters]


def _part(grad: Tensor) -> Tensor:
    return grad.to_local() if is_dtensor(grad) else grad


def alike(grads: Iterable[Tensor]) -> list[list[Tensor]]:
    """This rank's parts of the gradients, as dense tensors grouped by device and dtype: what a foreach kernel takes."""
    places: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        part = _part(grad)
        part = part._values() if part.is_sparse else part
        places.setdefault((part.device, part.dtype), []).append(part)
    return list(places.values())


@torch.no_grad()
def multiply(param_groups: Iterable[dict[str, Any]], factor: float | Tensor) -> None:
    """Multiply all gradients by `factor`, in place."""
    for same in alike(grad for group in param_groups for grad in gradients(group["params"])):
        torch._foreach_mul_(same, factor.to(same[0].device) if isinstance(factor, Tensor) else factor)


class SetAside:
    """Takes the gradients from parameters, so that what a step adds lies alone; costs memory only inside a window."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._kept = [parameter.grad for parameter in self._parameters]
        self.discard()

    def discard(self) -> None:
        """Drop what the step has added."""
        for parameter in self._parameters:
            parameter.grad = None

    def present(self, parameters: Iterable[Tensor]) -> list[int]:
        """1 for each parameter that has a gradient, set aside or added since; 0 for the others."""
        there = {
            id(parameter)
            for parameter, kept in zip(self._parameters, self._kept, strict=True)
            if kept is not None or parameter.grad is not None
        }
        return [int(id(parameter) in there) for parameter in parameters]

    def put_back(self) -> None:
        """Give the parameters the gradients they had, and no others."""
        for parameter, kept in zip(self._parameters, self._kept, strict=True):
            parameter.grad = kept
        self._kept = []

    @torch.no_grad()
    def add(self) -> None:
        """Give the parameters the gradients they had plus what the step has added."""
        old: list[Tensor] = []
        new: list[Tensor] = []
        for parameter, kept in zip(self._parameters, self._kept, strict=True):
            added = parameter.grad
            if kept is None:
                continue
            parameter.grad = kept
            if added is None:
                continue
            if added.is_sparse or kept.is_sparse:
                parameter.grad = kept + added
            else:
                old.append(kept)
                new.append(added)
        for kept_alike, added_alike in zip(alike(old), alike(new), strict=True):
            torch._foreach_add_(kept_alike, added_alike)
        self._kept = []


_DEPTH: Final = 4
"""How far from the loss a division by a count on the device is looked for."""
_Gradients = tuple[Tensor | None, ...]
_LEAF: Final = "AccumulateGrad"


def zero_if_weightless(loss: Tensor, weight: float | Tensor, joined: bool = False) -> AbstractContextManager[None]:
    """Return a block for the backward of `loss`, in which gradients are zeros where `weight` is zero.

    Multiplying by zero is not enough: zero times the nan of a mean over nothing is nan. A weight in host memory is
    looked at, and everything behind a loss of weight zero is set to zero. A weight on a device is not read, which would
    wait for it; the first operations behind the loss, where means are taken, are guarded on the device. Only they are
    guarded, too, where the graph is `joined` with those of other ranks, whose gradients pass through the rest of it.
    """
    if loss.grad_fn is None or (_readable(weight) and float(weight) != 0):
        return nullcontext()
    return _hooked(loss.grad_fn, *_change(weight, joined))


def leave_if_weightless(loss: Tensor, weight: float | Tensor) -> None:
    """Make a backward of `loss` that comes later leave zeros where `weight` is zero."""
    if loss.grad_fn is not None and not (_readable(weight) and float(weight) != 0):
        _hook(loss.grad_fn, *_change(weight, joined=False))  # the hooks go with the graph


def _readable(weight: float | Tensor) -> bool:
    return not isinstance(weight, Tensor) or weight.device.type == "cpu"


def _change(weight: float | Tensor, joined: bool) -> tuple[int | None, Callable[[_Gradients], _Gradients]]:
    """Return how deep gradients are changed, and how."""
    if not isinstance(weight, Tensor) or _readable(weight):
        return _DEPTH if joined else None, _zeros
    counts = weight.detach().reshape(()) != 0

    def guarded(grads: _Gradients) -> _Gradients:
        return tuple(g if g is None else torch.where(counts.to(g.device), g, torch.zeros_like(g)) for g in grads)

    return _DEPTH, guarded


def _zeros(grads: _Gradients) -> _Gradients:
    return tuple(None if grad is None else torch.zeros_like(grad) for grad in grads)


@contextmanager
def _hooked(root: Node, depth: int | None, change: Callable[[_Gradients], _Gradients]) -> Iterator[None]:
    """Change what every node from the root on hands back, down to some depth, as long as the block runs.

    Not what parameters receive: their own hooks come in between, and one that averages over ranks brings gradients of
    ranks whose loss does weigh something.
    """
    handles = _hook(root, depth, change)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(root: Node, depth: int | None, change: Callable[[_Gradients], _Gradients]) -> list[Any]:
    handles: list[Any] = []  # Any: torch names no type for them
    level, seen = [root], {root}
    while level and depth != 0:
        handles += [node.register_hook(lambda handed, _: change(handed)) for node in level]
        behind = dict.fromkeys(after for node in level for after, _ in node.next_functions if after is not None)
        level = [node for node in behind if node not in seen and not node.name().endswith(_LEAF)]
        seen.update(level)
        depth = None if depth is None else depth - 1
    return handles


class Unowned:
    """Keeps the gradients of earlier windows apart from those of the window in progress.

    A window's gradients are unscaled and normalised when it ends. Those of earlier windows have been, so that they must not
    be multiplied again. Where nothing will be multiplied (no accumulation, no weight, no loss scale) they stay in .grad.
    """

    def __init__(self, clock: StepClock, precision: Precision, optimizers: list[PreparedOptimizer]) -> None:
        self._clock = clock
        self._precision = precision
        self._optimizers = optimizers
        self._known: list[Tensor] = []  # of all models; under FSDP2 a model has other ones between forward and backward
        self._open = False
        self._merged = False
        self.earlier: dict[Tensor, Tensor] | None = None
        """The gradients of earlier windows, while a window is in progress whose own lie in .grad."""

    def learn(self, models: Iterable[nn.Module]) -> None:
        """Note the parameters of the models that are prepared."""
        self._known = list(dict.fromkeys(p for model in models for p in model.parameters()))

    def parameters(self) -> list[Tensor]:
        """Return the parameters that take gradients and belong to no optimizer."""
        if not all(optimizer.readable for optimizer in self._optimizers):
            return []  # an engine keeps its gradients elsewhere
        owned = {id(p) for optimizer in self._optimizers for p in optimizer.parameters}
        return [p for p in self._known if p.requires_grad and id(p) not in owned]

    def begin(self, changes: bool) -> None:
        """Say that a loss is about to be backpropagated, whose window may be multiplied by something at its end."""
        if self._open:
            return
        self._open, self._merged = True, False
        if changes or self._precision.scaler is not None:
            self.put_aside({p: p.grad for p in self.parameters() if p.grad is not None})

    def put_aside(self, earlier: Mapping[Tensor, Tensor]) -> None:
        """Keep these gradients apart until the window ends."""
        # A gradient may lie in memory that the next reduction overwrites.
        self.earlier = {p: grad.clone() for p, grad in earlier.items()}
        for parameter in self.parameters():
            parameter.grad = None
        self._open, self._merged = True, False

    @torch.no_grad()
    def settle(self) -> None:
        """Unscale and normalise the window's gradients and add those of earlier windows; a second call does nothing.

        Ranks: every rank.
        """
        if not self._open or self._merged or self.earlier is None:
            return
        self._merged = True
        parameters, clock = self.parameters(), self._clock
        factor: float | Tensor | None = None
        if clock.lanes is not None and clock.pending:
            clock.merge_lanes(parameters)
        elif clock.pending:
            factor = clock.correction()
        scaler = self._precision.scaler
        if scaler is not None and scaler.is_enabled():
            factor = (1.0 if factor is None else factor) / scaler.get_scale()
        if factor is not None:
            multiply([{"params": parameters}], factor)
        for parameter, grad in self.earlier.items():
            parameter.grad = grad.clone() if parameter.grad is None else parameter.grad.add_(grad)

    def close(self, applied: bool) -> None:
        """End the window. The gradients of one whose update was skipped are dropped. Ranks: every rank."""
        self.settle()
        if not applied and self.earlier is not None:
            for parameter in self.parameters():
                parameter.grad = self.earlier.get(parameter)
        self.earlier, self._open = None, False

    def saved(self) -> dict[int, Tensor]:
        """Return the gradients that outlive the window in progress, by the identity of their parameters."""
        if self.earlier is not None and not self._merged:
            return {id(parameter): grad for parameter, grad in self.earlier.items()}
        if self._open:
            return {}  # in .grad, together with those of the window
        return {id(p): p.grad for p in self.parameters() if p.grad is not None}

    def restore(self, gradients: Iterable[tuple[Tensor, Tensor]], open_window: bool) -> None:
        """Put back what `saved` gave, after .grad was restored."""
        self.earlier, self._open, self._merged = None, False, False
        found = dict(gradients)
        if not open_window:
            for parameter, grad in found.items():
                parameter.grad = grad
        else:
            self.earlier, self._open = found, True
