"""Values that ranks hold in common: the tensors and numbers that must be equal, and along which mesh axes."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hasten.modules.names import (
    canonical_name,
    is_dtensor,
    named_parameters,
    placements,
)
from hasten.modules.surgery import own_buffers
from hasten.optim.clock import StepClock
from hasten.optim.engine import EngineOptimizer
from hasten.optim.optimizer import PreparedOptimizer
from hasten.prepare_args import PreparedObjects
from hasten.runtime.mesh_plan import BATCH, SHARD, Axis

Kind = Literal["updates", "setting", "gradient", "state", "parameter", "buffer"]
COMPARED: Final = frozenset({Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.CP, Axis.TP})
"""Axes along which values can be equal; pipeline stages hold different layers."""
_AXES: Final = frozenset(map(str, Axis))
_PLAIN: Final = frozenset({Tensor, nn.Parameter})
_STATISTICS: Final = frozenset({"running_mean", "running_var", "num_batches_tracked"})


@dataclass(frozen=True, slots=True)
class ComparedTensor:
    """One value that must be equal on ranks that differ only along `axes`."""

    kind: Kind
    name: str
    axes: frozenset[Axis]
    value_text: str = ""
    """The value as text, if it is short."""
    layout: str = ""
    """Shape and dtype of a tensor; empty for other values."""

    @property
    def has_tensor(self) -> bool:
        """True if the entry is a tensor, not a number."""
        return bool(self.layout)

    @property
    def digest(self) -> int:
        """A 64-bit hash of everything but the tensor's contents."""
        return _digest_text(f"{self.kind} {self.name} {self.value_text} {self.layout}")


EntryWithTensor = tuple[ComparedTensor, Tensor | None]
"""An entry with its tensor, if any; entries are stored, tensors are not."""


@dataclass(slots=True)
class Replicas:
    """The entries of a run, collected at each check because models, states and loaders change."""

    prepared: PreparedObjects
    clock: StepClock
    ignored: Sequence[str] = ()
    """Patterns of names that are not compared."""

    def compared_values(self) -> Iterator[EntryWithTensor]:
        """Yield all values that must be equal, in an order that is the same on all ranks."""
        progress_words = (
            f"{self.clock.num_updates} updates, {self.clock.num_passes} backward passes"
        )
        yield (
            ComparedTensor(
                "updates",
                "updates for each backward pass",
                COMPARED,
                value_text=progress_words,
            ),
            None,
        )
        names_and_axes: dict[int, tuple[str, frozenset[Axis]]] = {}
        for object_number, model in enumerate(self.prepared.models):
            name_prefix = f"model[{object_number}]." if object_number else ""
            yield from self._model_entries(model, name_prefix, names_and_axes)
        for object_number, optimizer in enumerate(self.prepared.optimizers):
            name_prefix = f"optimizer[{object_number}]." if object_number else ""
            yield from self._optimizer_entries(optimizer, name_prefix, names_and_axes)

    def _model_entries(
        self,
        model: nn.Module,
        name_prefix: str,
        names_and_axes: dict[int, tuple[str, frozenset[Axis]]],
    ) -> Iterator[EntryWithTensor]:
        ignored_names, synchronised_modules = _unsynchronised_by_ddp(model)
        for plain_name, parameter in named_parameters(model):
            full_name = name_prefix + plain_name
            if (
                id(parameter) in names_and_axes
                or plain_name in ignored_names
                or self._ignores_name(full_name, plain_name)
            ):
                continue
            equal_axes = axes_of(parameter)
            names_and_axes[id(parameter)] = full_name, equal_axes
            yield from _tensor_entries("parameter", full_name, equal_axes, parameter)
            if parameter.grad is not None:
                yield from _tensor_entries(
                    "gradient", full_name, equal_axes, parameter.grad
                )
        for plain_name, buffer in _unsynchronised_buffers(model, synchronised_modules):
            full_name = name_prefix + plain_name
            if plain_name not in ignored_names and not self._ignores_name(
                full_name, plain_name
            ):
                yield from _tensor_entries("buffer", full_name, axes_of(buffer), buffer)

    def _optimizer_entries(
        self,
        optimizer: PreparedOptimizer,
        name_prefix: str,
        names_and_axes: Mapping[int, tuple[str, frozenset[Axis]]],
    ) -> Iterator[EntryWithTensor]:
        plain_optimizer = optimizer.optimizer
        if isinstance(plain_optimizer, EngineOptimizer) or _divides_state(
            plain_optimizer
        ):
            return  # each rank holds a different shard of the state
        for group_number, param_group in enumerate(plain_optimizer.param_groups):
            group_name = f"{name_prefix}param_groups[{group_number}]"
            for option, option_value in param_group.items():
                if isinstance(option_value, Tensor):
                    yield from _tensor_entries(
                        "setting", f"{group_name}[{option!r}]", COMPARED, option_value
                    )
                elif option != "params" and _is_plain_value(option_value):
                    yield (
                        ComparedTensor(
                            "setting",
                            f"{group_name}[{option!r}]",
                            COMPARED,
                            value_text=repr(option_value),
                        ),
                        None,
                    )
            for parameter in param_group["params"]:
                if id(parameter) not in names_and_axes:
                    continue  # excluded, or not a parameter of a prepared model
                full_name, equal_axes = names_and_axes[id(parameter)]
                for key, option_value in plain_optimizer.state.get(
                    parameter, {}
                ).items():
                    if isinstance(option_value, Tensor):
                        yield from _tensor_entries(
                            "state",
                            f"{name_prefix}{full_name} ({key})",
                            equal_axes,
                            option_value,
                        )

    def _ignores_name(self, *names: str) -> bool:
        for pattern in self.ignored:
            if any(fnmatch.fnmatchcase(full_name, pattern) for full_name in names):
                return True
        return False


@lru_cache(maxsize=1 << 14)  # a pure function of names, which recur in every check
def _digest_text(text: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"
    )


@lru_cache(maxsize=1 << 10)  # a pure function of shapes, which recur in every check
def _layout_text(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{shape} {dtype}"


def axes_of(tensor: Tensor) -> frozenset[Axis]:
    """Return the axes along which all ranks hold the same shard of the tensor: all axes, unless it is sharded."""
    if type(tensor) in _PLAIN and not vars(tensor):
        return COMPARED
    equal_axes = set(COMPARED)
    if is_dtensor(tensor):
        # a mesh of the user's
        mesh_axes = tensor.device_mesh.mesh_dim_names or [""] * len(tensor.placements)
        for axis_name, placement in zip(mesh_axes, tensor.placements, strict=True):
            if not isinstance(placement, placements().Replicate):
                # An axis of a separate mesh divides experts among data-parallel ranks.
                equal_axes.difference_update(
                    {Axis(axis_name)} if axis_name in _AXES else BATCH
                )
                # ranks of one sequence hold different shards
                if axis_name == Axis.DP_SHARD:
                    equal_axes.difference_update(SHARD)
    # megatron-core's mark of a tensor-parallel shard
    elif getattr(tensor, "tensor_model_parallel", False):
        equal_axes.discard(Axis.TP)
    if not getattr(tensor, "allreduce", True):
        # megatron-core's mark of an expert, which only some data-parallel ranks hold
        equal_axes.difference_update(BATCH, {Axis.CP, Axis.TP})
    return frozenset(equal_axes)


def _tensor_entries(
    kind: Kind,
    full_name: str,
    equal_axes: frozenset[Axis],
    tensor: Tensor,
) -> Iterator[EntryWithTensor]:
    """Yield the entries of a tensor, or of its inner tensors; nothing for a tensor without memory."""
    local_tensor: Any = tensor  # Any: subclasses of several packages
    if type(tensor) not in _PLAIN:
        local_tensor = tensor.detach()
        if is_dtensor(local_tensor):
            local_tensor = local_tensor.to_local()
    if local_tensor.is_meta or local_tensor.layout is not torch.strided:
        return
    if type(local_tensor) not in _PLAIN and hasattr(local_tensor, "__tensor_flatten__"):
        for inner_name in local_tensor.__tensor_flatten__()[0]:
            yield from _tensor_entries(
                kind,
                f"{full_name}.{inner_name}",
                equal_axes,
                getattr(local_tensor, inner_name),
            )
        return
    yield (
        ComparedTensor(
            kind,
            full_name,
            equal_axes,
            layout=_layout_text(tuple(local_tensor.shape), local_tensor.dtype),
        ),
        local_tensor,
    )


def _unsynchronised_by_ddp(model: nn.Module) -> tuple[frozenset[str], frozenset[int]]:
    """Return names that DDP does not synchronise, and modules whose buffers it broadcasts before each forward."""
    ignored_names: set[str] = set()
    synchronised_modules: set[int] = set()
    for outer_name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            first_name = canonical_name(
                f"{outer_name}.module" if outer_name else "module", model
            )
            ignored_names.update(
                f"{first_name}.{full_name}" if first_name else full_name
                for full_name in module.parameters_to_ignore
            )
            if module.broadcast_buffers:
                synchronised_modules.update(map(id, module.modules()))
    return frozenset(ignored_names), frozenset(synchronised_modules)


def _unsynchronised_buffers(
    model: nn.Module, synchronised_modules: Iterable[int]
) -> Iterator[tuple[str, Tensor]]:
    """Yield persistent buffers that ranks must fill alike: neither caches, nor the running statistics of normalisation layers."""
    for outer_name, module in model.named_modules():
        if id(module) in synchronised_modules:
            continue
        for leaf_name, buffer in own_buffers(module, persistent_only=True):
            if leaf_name in _STATISTICS and hasattr(module, "track_running_stats"):
                continue
            full_name = f"{outer_name}.{leaf_name}" if outer_name else leaf_name
            yield canonical_name(full_name, model), buffer


def _divides_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer shards its state over ranks: torch's ZeroRedundancyOptimizer."""
    return any(
        base_class.__name__ == "ZeroRedundancyOptimizer"
        for base_class in type(optimizer).__mro__
    )


def _is_plain_value(option_value: object) -> bool:
    if isinstance(option_value, (tuple, list)):
        return all(map(_is_plain_value, option_value))
    return option_value is None or isinstance(option_value, (bool, int, float, str))
