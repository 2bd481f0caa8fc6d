"""The arguments of prepare(), sorted by kind, and the objects that an Accelerator has prepared."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from hasten.data.loader import Loader
from hasten.errors import PrepareError
from hasten.optim.ema import AverageState
from hasten.optim.optimizer import PreparedOptimizer
from hasten.optim.scheduler import PreparedScheduler

Kind = Literal["model", "optimizer", "scheduler", "loader", "nothing"]


@dataclass(slots=True)
class Item:
    """One argument of prepare(); `value` is replaced by the prepared object."""

    kind: Kind
    value: Any  # a model, optimizer, factory, scheduler, loader or None, as `kind` says
    place: bool
    """True if the object may be moved to the device."""


@dataclass(slots=True)
class PrepareArguments:
    """Arguments of one prepare() call."""

    items: list[Item] = field(default_factory=list)
    earlier: list[nn.Module] = field(default_factory=list)
    """The user's modules from earlier calls; optimizers of this call may hold their parameters."""

    def of(self, kind: Kind) -> list[Item]:
        """Return the items of one kind, in call order."""
        items = []
        for item in self.items:
            if item.kind == kind:
                items.append(item)
        return items


@dataclass(slots=True)
class PreparedObjects:
    """All objects that one Accelerator has prepared, in order."""

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[PreparedOptimizer] = field(default_factory=list)
    schedulers: list[PreparedScheduler] = field(default_factory=list)
    loaders: list[Loader] = field(default_factory=list)
    averages: list[AverageState] = field(default_factory=list)
    """Moving averages of the models' weights."""

    def holds(self, value: object) -> bool:
        """Return whether `prepare()` of this Accelerator returned `value`."""
        return id(value) in set(
            map(id, (*self.models, *self.optimizers, *self.schedulers, *self.loaders))
        )

    def index_of(self, model: nn.Module) -> int:
        """Return the index of a prepared model. Raises: PrepareError for any other."""
        for index, prepared_model in enumerate(self.models):
            if prepared_model is model:
                return index
        raise PrepareError(
            f"a {type(model).__name__} was given that this Accelerator has not prepared, so nothing is known of its "
            "gradients; pass what prepare() returned."
        )

    def clear(self) -> None:
        """Remove all objects."""
        for prepared_objects in (
            self.models,
            self.optimizers,
            self.schedulers,
            self.loaders,
            self.averages,
        ):
            prepared_objects.clear()


def kind_of(value: Any) -> Kind:  # Any: an argument of the user
    """Return the kind of an argument of prepare()."""
    if value is None:
        return "nothing"
    if isinstance(value, nn.Module):
        return "model"
    if isinstance(value, Optimizer) or is_factory(value):
        return "optimizer"
    if isinstance(value, LRScheduler) or (
        hasattr(value, "optimizer") and callable(getattr(value, "step", None))
    ):
        return "scheduler"
    if isinstance(value, DataLoader):
        return "loader"
    if isinstance(value, Dataset):
        advice = "wrap the dataset in a torch.utils.data.DataLoader"
    else:
        advice = "leave it out"
    raise PrepareError(
        f"prepare() got an object of type {type(value).__name__}, which is not a model, optimizer, scheduler or "
        f"DataLoader, so nothing would be done with it; {advice}."
    )


def is_factory(value: Any) -> bool:  # Any: an argument of the user
    """Return whether `value` makes an optimizer when called with parameters: an optimizer class, or a partial of one."""
    if isinstance(value, functools.partial):
        optimizer_class = value.func
    else:
        optimizer_class = value
    return isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)
