"""The Strategy protocol, the capabilities a strategy declares, and the protocols of the transforms it is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten.config.root import Config
from hasten.data.loader import MakeMove
from hasten.optim.window import Number
from hasten.precision.base import Precision
from hasten.prepare_args import PrepareArguments
from hasten.runtime.context import ProcessContext
from hasten.runtime.topology import Topology
from hasten.trees import Tree


@dataclass(frozen=True, slots=True)
class Caps:
    """Capabilities of a strategy: the tasks it handles itself, and its limits."""

    owns_precision: bool = False
    sharded_state: bool = False
    synchronises: bool = True
    hides_gradients: bool = False
    """Inside `no_sync`, gradients accumulate outside the parameters' .grad."""
    gradients_s: Callable[[], float] = lambda: 0.0
    """Returns the seconds a backward waits for gradients of other ranks, as last measured; 0 when unknown."""
    transfer: MakeMove | None = None
    """Factory of the function that moves batches to the device, where a plain copy is not enough."""


class Weigh(Protocol):
    """Function that scales a loss for backward by its weight; None weighs the loss like every other."""

    def __call__(self, loss: Tensor, weight: Number | None = None) -> Tensor: ...


class Stage(IntEnum):
    """Fixed order in which transforms are applied to a model."""

    TENSOR = 0
    SPLIT = 1
    PLACE = 2
    CONVERT = 3
    RECOMPUTE = 4
    COMPILE_BLOCKS = 5
    DISTRIBUTE = 6
    COMPILE_WHOLE = 7


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    """Options of `prepare()` for one model."""

    place: bool = True
    """Move the model to the process's device."""
    train: bool = True
    """Prepare the model for training; False leaves the model unsharded and its gradients unsynchronised."""


class Transform(Protocol):
    """One step in preparing a model for parallel training."""

    @property
    def stage(self) -> Stage: ...

    def apply(
        self,
        model: nn.Module,
        request: PrepareRequest,
        ctx: ProcessContext,
        precision: Precision,
    ) -> nn.Module:
        """Return the transformed model: the same object, or a module that wraps it."""
        ...

    def undo(self, model: nn.Module) -> nn.Module:
        """Return the model without this transform, as far as the transform can be undone."""
        ...


class DistributionTransform(Transform, Protocol):
    """Transform that spreads a model over processes, with the operations that depend on the wrapper it uses."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context manager in which backward leaves gradients unsynchronised, as far as memory allows."""
        ...

    def drop_gradients(self, model: nn.Module) -> None:
        """Drop all gradients of the model, also those that its wrapper holds. Local."""
        ...

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the full, unsharded state dict. Ranks: every rank."""
        ...

    def mark_forward_method(self, model: nn.Module, name: str) -> None:
        """Make calls of the method behave like calls of the model itself."""
        ...

    def join(self, models: list[nn.Module]) -> AbstractContextManager[None]:
        """Return a context manager in which ranks may run out of batches at different times."""
        ...


class Strategy(Protocol):
    """Interface of all strategies, which spread models over processes. Models and optimizers are always prepared together."""

    @property
    def name(self) -> str: ...

    @property
    def caps(self) -> Caps: ...

    def building(self, ctx: ProcessContext) -> AbstractContextManager[None]:
        """Return a context manager in which models are built already sharded, if the strategy can. Ranks: every rank."""
        ...

    def prepare(
        self,
        bundle: PrepareArguments,
        ctx: ProcessContext,
        precision: Precision,
        train: bool = True,
    ) -> None:
        """Replace the models and optimizers of the bundle by prepared ones. Ranks: every rank."""
        ...

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context manager in which backward does not synchronise gradients."""
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
        """Compute the loss of a batch, backpropagate it as scaled by `weigh`, and return the loss. Ranks: every rank."""
        ...

    def clip_norm(
        self, parameters: Sequence[Tensor], max_norm: float, norm_type: float
    ) -> Tensor:
        """Clip the gradients to a global norm at the end of a window and return the norm before. Ranks: every rank."""
        ...

    def clip_value(self, parameters: Sequence[Tensor], limit: float) -> None:
        """Clamp each element of the gradients at the end of a window. Ranks: every rank."""
        ...

    def whole_weights(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context manager in which the user's module may be written to; all copies are updated. Ranks: every rank."""
        ...

    def unwrap(
        self, model: nn.Module, keep_precision: bool = True, keep_compile: bool = True
    ) -> nn.Module:
        """Return the user's module inside a prepared one."""
        ...

    def drop_gradients(self, model: nn.Module) -> None:
        """Drop all gradients of the model, also those that its wrapper holds. Local."""
        ...

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return a state dict of unsharded parameters and buffers, on the CPU if they are sharded. Ranks: every rank."""
        ...

    def mark_forward_method(self, model: nn.Module, name: str) -> None:
        """Make calls of the method synchronise gradients like calls of the model itself."""
        ...

    def join(self, models: list[nn.Module]) -> AbstractContextManager[None]:
        """Return a context manager in which ranks may run out of batches at different times."""
        ...


@dataclass(frozen=True, slots=True)
class OfferedStrategy:
    """Strategy of an extension; its `strategies` table names such an object. The strategy lays out all axes of the mesh itself."""

    create: Callable[[Config, ProcessContext], Strategy]
    start_device: Callable[[Config, Topology], torch.device] | None = None
    """Starts the devices and returns the one of this process; None for the host's accelerator or the CPU."""


@dataclass(frozen=True, slots=True)
class OfferedOffload:
    """Training state in host memory, of an extension; its `offload_modes` table names such an object."""

    refuse_combinations: Callable[[Config, ProcessContext, bool], None]
    """Raises ConfigError for settings that cannot be combined with it; the last argument says whether models are compiled."""
    stream_updates: Callable[
        [Optimizer, Config, ProcessContext, Callable[[], bool], Sequence[nn.Module]],
        None,
    ]
    """Lets an optimizer update its parameters from host memory. The function says whether a window ends, and the models may be hooked."""
    parameter_transforms: Callable[[], tuple[Transform, Transform]] | None = None
    """Makes the transforms that place and stream the parameters of one process; None if parameters stay on the device."""


def is_trainable(model: nn.Module) -> bool:
    """Return whether any parameter of the model requires gradients."""
    return any(parameter.requires_grad for parameter in model.parameters())
