"""Operations on the gradients of many parameters at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from hasten.modules.names import is_dtensor
from hasten.precision.base import Precision


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that are not None."""
    return [p.grad for p in parameters if p.grad is not None]


def versions(parameters: Iterable[Tensor]) -> list[tuple[Tensor | None, int]]:
    """Return each gradient with its version counter, which any write increments."""
    return [
        (p.grad, 0 if p.grad is None else _part(p.grad)._version) for p in parameters
    ]


def _part(grad: Tensor) -> Tensor:
    return grad.to_local() if is_dtensor(grad) else grad


def alike(grads: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return this rank's shards of the gradients, as dense tensors grouped by device and dtype for foreach kernels."""
    parts_by_place: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        local_part = _part(grad)
        local_part = local_part._values() if local_part.is_sparse else local_part
        parts_by_place.setdefault((local_part.device, local_part.dtype), []).append(
            local_part
        )
    return list(parts_by_place.values())


@torch.no_grad()
def multiply(param_groups: Iterable[dict[str, Any]], factor: float | Tensor) -> None:
    """Multiply all gradients by `factor`, in place."""
    for alike_gradients in alike(
        grad for group in param_groups for grad in gradients(group["params"])
    ):
        torch._foreach_mul_(
            alike_gradients,
            factor.to(alike_gradients[0].device)
            if isinstance(factor, Tensor)
            else factor,
        )


_DEPTH: Final = 4
"""Distance from the loss up to which a division by a count on the device is looked for."""
_Gradients = tuple[Tensor | None, ...]
_LEAF: Final = "AccumulateGrad"


def zero_if_weightless(
    loss: Tensor, weight: float | Tensor, joined: bool = False
) -> AbstractContextManager[None]:
    """Return a context manager for the backward of `loss` in which gradients are zero if `weight` is zero.

    Multiplying by zero is not enough: zero times the nan of a mean over nothing is nan. A weight in host memory is
    read, and everything behind a loss of weight zero is set to zero. A weight on a device is not read, which would
    synchronize; the first operations behind the loss, where means are taken, are guarded on the device. Only those are
    guarded, too, if the graph is `joined` with those of other ranks, whose gradients flow through the rest of it.
    """
    if loss.grad_fn is None or (_readable(weight) and float(weight) != 0):
        return nullcontext()
    return _hooked(loss.grad_fn, *_change(weight, joined))


def leave_if_weightless(loss: Tensor, weight: float | Tensor) -> None:
    """Make a later backward of `loss` produce zeros if `weight` is zero."""
    if loss.grad_fn is not None and not (_readable(weight) and float(weight) != 0):
        # the hooks are freed with the graph
        _hook(loss.grad_fn, *_change(weight, joined=False))


def _readable(weight: float | Tensor) -> bool:
    return not isinstance(weight, Tensor) or weight.device.type == "cpu"


def _change(
    weight: float | Tensor, joined: bool
) -> tuple[int | None, Callable[[_Gradients], _Gradients]]:
    """Return the depth down to which gradients are changed, and the change."""
    if not isinstance(weight, Tensor) or _readable(weight):
        return _DEPTH if joined else None, _zeros
    counts = weight.detach().reshape(()) != 0

    def guarded(grads: _Gradients) -> _Gradients:
        return tuple(
            g if g is None else torch.where(counts.to(g.device), g, torch.zeros_like(g))
            for g in grads
        )

    return _DEPTH, guarded


def _zeros(grads: _Gradients) -> _Gradients:
    return tuple(None if grad is None else torch.zeros_like(grad) for grad in grads)


@contextmanager
def _hooked(
    root: Node, depth: int | None, change: Callable[[_Gradients], _Gradients]
) -> Iterator[None]:
    """Context manager that changes the gradients returned by every node from the root on, down to some depth.

    The gradients that parameters receive are not changed: their hooks run in between, and a hook that averages over
    ranks includes gradients of ranks with a weighted loss.
    """
    handles = _hook(root, depth, change)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(
    root: Node, depth: int | None, change: Callable[[_Gradients], _Gradients]
) -> list[Any]:
    handles: list[Any] = []  # Any: torch names no type for them
    level, seen = [root], {root}
    while level and depth != 0:
        handles += [
            node.register_hook(lambda handed, _: change(handed)) for node in level
        ]
        behind = dict.fromkeys(
            after
            for node in level
            for after, _ in node.next_functions
            if after is not None
        )
        level = [
            node
            for node in behind
            if node not in seen and not node.name().endswith(_LEAF)
        ]
        seen.update(level)
        depth = None if depth is None else depth - 1
    return handles


class GradientHolder(Protocol):
    """Protocol of an optimizer as the holder of gradients."""

    @property
    def parameters(self) -> list[Tensor]: ...
    @property
    def readable(self) -> bool:
        """True if gradients are in the parameters' .grad."""
        ...


class WindowCorrection(Protocol):
    """Protocol of the step clock: the correction that a window's gradients need before they are used."""

    pending: bool

    def correction(self) -> float | Tensor | None: ...


class Unowned:
    """Gradients of parameters without an optimizer; separates those of earlier windows from the window in progress.

    A window's gradients are unscaled and normalised when it ends. Those of earlier windows are already, so they must
    not be multiplied again. If nothing will be multiplied (no accumulation, weight or loss scale), they stay in .grad.
    """

    def __init__(
        self,
        clock: WindowCorrection,
        precision: Precision,
        optimizers: Sequence[GradientHolder],
    ) -> None:
        self._clock = clock
        self._precision = precision
        self._optimizers = optimizers
        self.known: list[Tensor] = []
        """The parameters of all models; under FSDP2 a model has others between forward and backward."""
        self._open = False
        self._merged = False
        self.earlier: dict[Tensor, Tensor] | None = None
        """Gradients of earlier windows, while the gradients of a window in progress are in .grad."""

    def learn(self, models: Iterable[nn.Module]) -> None:
        """Record the parameters of the prepared models."""
        self.known = list(
            dict.fromkeys(p for model in models for p in model.parameters())
        )

    def parameters(self) -> list[Tensor]:
        """Return the parameters that take gradients and belong to no optimizer."""
        if not all(optimizer.readable for optimizer in self._optimizers):
            return []  # an engine stores its gradients elsewhere
        owned = {id(p) for optimizer in self._optimizers for p in optimizer.parameters}
        return [p for p in self.known if p.requires_grad and id(p) not in owned]

    def begin(self, changes: bool) -> None:
        """Prepare for the backward of a loss; `changes` means that its window may be multiplied at its end."""
        if self._open:
            return
        self._open, self._merged = True, False
        if changes or self._precision.scaler is not None:
            self.put_aside({p: p.grad for p in self.parameters() if p.grad is not None})

    def put_aside(self, earlier: Mapping[Tensor, Tensor]) -> None:
        """Hold these gradients separately until the window ends."""
        # A gradient may be in memory that the next reduction overwrites.
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
        if clock.pending:
            factor = clock.correction()
        scaler = self._precision.scaler
        if scaler is not None and scaler.is_enabled():
            factor = (1.0 if factor is None else factor) / scaler.get_scale()
        if factor is not None:
            multiply([{"params": parameters}], factor)
        for parameter, grad in self.earlier.items():
            parameter.grad = (
                grad.clone() if parameter.grad is None else parameter.grad.add_(grad)
            )

    def close(self, applied: bool) -> None:
        """End the window. If its update was skipped, its gradients are dropped. Ranks: every rank."""
        self.settle()
        if not applied and self.earlier is not None:
            for parameter in self.parameters():
                parameter.grad = self.earlier.get(parameter)
        self.earlier, self._open = None, False

    def saved(self) -> dict[Tensor, Tensor]:
        """Return the gradients of earlier windows."""
        if self.earlier is not None:
            return dict(self.earlier)
        if self._open:
            return {}
        return {p: p.grad for p in self.parameters() if p.grad is not None}

    def restore(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Restore the value that `saved` returned, at the beginning of a window."""
        self.earlier, self._open, self._merged = None, False, False
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


class UnownedState(torch.optim.Optimizer):
    """Gradients of parameters without an optimizer in the form of optimizer state, so that checkpoints store and reshard them."""

    def __init__(self, unowned: Unowned) -> None:
        super().__init__([{"params": unowned.known}], {})
        self._unowned = unowned
        for parameter, gradient in unowned.saved().items():
            self.state[parameter]["gradient"] = gradient

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # Any: as in torch
        """Restore the gradients."""
        super().load_state_dict(state_dict)
        self._unowned.restore(
            {parameter: values["gradient"] for parameter, values in self.state.items()}
        )


def drop_gradients(model: nn.Module) -> None:
    """Set the gradients of all parameters to None."""
    for parameter in model.parameters():
        parameter.grad = None
