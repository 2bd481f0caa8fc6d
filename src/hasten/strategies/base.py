"""The Strategy protocol, the capabilities a strategy declares, and the transforms native strategies are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from hasten.data.loader import MakeMove
from hasten.optim.window import Number
from hasten.precision.base import Precision
from hasten.prepare_args import Bundle
from hasten.runtime.context import ProcessContext
from hasten.trees import Tree


class Retry(Protocol):
    """One model during one step. Forward and backward run in passes; a pass that fails is recovered from, then undone."""

    meets: bool
    """Forward and backward are collectives: a rank that stops in their middle leaves the others waiting."""

    def begin(self) -> None:
        """Run the collectives that the next pass would begin with, and remember what `put_back` restores. Ranks: every rank."""
        ...

    def quiet(self, last: bool) -> AbstractContextManager[object]:
        """A block for one pass, which leaves gradients unsynchronised as far as `reduce` can synchronise them later."""
        ...

    def recover(self) -> None:
        """Make the model usable again after an error in the middle of a pass. Local."""
        ...

    def put_back(self) -> None:
        """Undo what passes have left in the wrapper, besides parameters, buffers and their .grad. Local."""
        ...

    def reduce(self, used: Sequence[bool]) -> None:
        """Synchronise gradients where a window ends; `used` says which parameters have one on any rank. Ranks: every rank."""
        ...


class Whole:
    """A model of one process."""

    meets = False

    def begin(self) -> None:
        return None

    def quiet(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def recover(self) -> None:
        return None

    def put_back(self) -> None:
        return None

    def reduce(self, used: Sequence[bool]) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Caps:
    """What a strategy takes care of by itself, and what it cannot do."""

    owns_precision: bool = False
    sharded_state: bool = False
    synchronises: bool = True
    hides_gradients: bool = False
    """Inside `no_sync`, gradients add up where the parameters' .grad does not show them."""
    gradients_s: Callable[[], float] = lambda: 0.0
    """The time a backward waits for gradients of other ranks, as last measured; 0 where it is not known."""
    splits_sequences: bool = False
    """Ranks of the context-parallel axis get their part of each sequence from the strategy, not from a block."""
    transfer: MakeMove | None = None
    """Makes what brings batches to the device, where a copy to it would not do."""


class Weigh(Protocol):
    """Gives the loss to backpropagate for a loss and what it is the mean of, None for as much as every other."""

    def __call__(self, loss: Tensor, weight: Number | None = None) -> Tensor: ...


class Stage(IntEnum):
    """The fixed order in which transforms act on a model."""

    TENSOR = 0
    SPLIT = 1
    PLACE = 2
    CONVERT = 3
    RECOMPUTE = 4
    COMPILE_BLOCKS = 5
    SPREAD = 6
    COMPILE_WHOLE = 7


@dataclass(frozen=True, slots=True)
class Wish:
    """What one prepare() asks for one model."""

    place: bool = True
    """Move it to the process's device."""
    train: bool = True
    """Its gradients will be needed; false leaves it whole, unspread and unsynchronised."""


class Transform(Protocol):
    """One step on a model's way to being trained in parallel."""

    @property
    def stage(self) -> Stage: ...

    def apply(self, model: nn.Module, wish: Wish, ctx: ProcessContext, precision: Precision) -> nn.Module:
        """Return the transformed model: the same object, or a module around it."""
        ...

    def undo(self, model: nn.Module) -> nn.Module:
        """Return the model without this transform, as far as it can be taken off."""
        ...


PARTIAL: Final = "partial/"
"""Prefix of gradients in LoopState that are reduced over shards, not yet over replicas."""
UNSHARDED: Final = "unsharded/"
"""Prefix of gradients in LoopState that are whole on each rank, not yet reduced."""


@dataclass(frozen=True, slots=True)
class LoopState:
    """What a wrapped model keeps between two micro-steps besides parameters, buffers and their .grad."""

    notes: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON values
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


class KeepsLoopState(Protocol):
    """How checkpoints get at what a wrapped model keeps; `names` are parameter names by identity."""

    def unsettled(self, model: nn.Module) -> Callable[[], object] | None:
        """A collective without which `loop_state` would lack something, or None. Local; every rank must then run it."""
        ...

    def loop_state(self, model: nn.Module, names: Mapping[int, str], open_window: bool) -> LoopState:
        """What the wrapped model keeps on this rank. Local.

        Raises: CheckpointError in an open window whose gradients cannot be read.
        """
        ...

    def restore_loop_state(self, model: nn.Module, names: Mapping[int, str], state: LoopState) -> Tensor | None:
        """Put it back. Local; a loss that is returned must be backpropagated by every rank, before .grad is restored."""
        ...


class Spread(Transform, KeepsLoopState, Protocol):
    """The transform that spreads a model over processes, and what only it knows about its models."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a block in which backward leaves gradients unsynchronised, as far as memory allows."""
        ...

    def retry(self, model: nn.Module, boundary: bool) -> Retry | None:
        """Return how the model takes part in a step that may be run again; None where it cannot. Local."""
        ...

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the full, unsharded state dict. Ranks: every rank."""
        ...

    def mark_forward_method(self, model: nn.Module, name: str) -> None:
        """Make calls of the method act like calls of the model itself."""
        ...

    def join(self, models: list[nn.Module]) -> AbstractContextManager[None]:
        """Context manager in which ranks may run out of batches at different times."""
        ...


class Strategy(KeepsLoopState, Protocol):
    """How models are spread over processes. Models and optimizers are always prepared together."""

    @property
    def name(self) -> str: ...

    @property
    def caps(self) -> Caps: ...

    def building(self, ctx: ProcessContext) -> AbstractContextManager[None]:
        """Context manager in which models are built the way they will be spread, where that can be. Ranks: every rank."""
        ...

    def prepare(self, bundle: Bundle, ctx: ProcessContext, precision: Precision, train: bool = True) -> None:
        """Replace the models and optimizers of the bundle by their prepared forms. Ranks: every rank."""
        ...

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context manager in which backward does not synchronise gradients."""
        ...

    def retry(self, model: nn.Module, boundary: bool) -> Retry | None:
        """How the model takes part in a step that may be run again, at a window's end or not; None where it cannot. Local."""
        ...

    def backward(self, loss: Tensor, parts: int = 1, **kwargs: Any) -> None:
        """Backpropagate the loss divided by `parts`; keywords are passed to `Tensor.backward`."""
        ...

    def forward_backward(
        self,
        model: nn.Module,
        batch: Tree,
        loss_of: Callable[[nn.Module, Tree], Tensor],
        weigh: Weigh,
        weight: Callable[[Tree], Number] | None = None,
    ) -> Tensor:
        """Compute the loss of a batch and backpropagate what `weigh` makes of it and its weight; the loss. Ranks: every rank."""
        ...

    def clip_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Scale the gradients at the end of a window to a global norm; the norm they had. Ranks: every rank."""
        ...

    def clip_value(self, parameters: Sequence[Tensor], limit: float) -> None:
        """Clamp every element of the gradients at the end of a window. Ranks: every rank."""
        ...

    def whole_weights(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context manager in which weights may be written into the user's module; all copies are updated. Ranks: every rank."""
        ...

    def unwrap(self, model: nn.Module, keep_precision: bool = True, keep_compile: bool = True) -> nn.Module:
        """Return the user's own module inside a prepared one."""
        ...

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return every parameter and buffer whole, on the CPU when sharded. Ranks: every rank."""
        ...

    def mark_forward_method(self, model: nn.Module, name: str) -> None:
        """Make calls of the method synchronise gradients like calls of the model itself."""
        ...

    def join(self, models: list[nn.Module]) -> AbstractContextManager[None]:
        """Context manager in which ranks may run out of batches at different times."""
        ...


def is_trainable(model: nn.Module) -> bool:
    """Return whether any parameter of the model takes gradients."""
    return any(p.requires_grad for p in model.parameters())


def parameter_device(model: nn.Module) -> torch.device | None:
    """Return the device of the model's first parameter or buffer, or None when it has neither."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return None
