"""Values that ranks hold in common: the tensors and numbers that must be equal, and along which mesh axes."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hasten.modules.names import canonical_name, is_dtensor, named_parameters, placements
from hasten.modules.surgery import may_draw, own_buffers
from hasten.optim.clock import StepClock
from hasten.optim.engine import EngineOptimizer
from hasten.optim.optimizer import PreparedOptimizer
from hasten.prepare_args import PreparedObjects
from hasten.runtime.mesh_plan import BATCH, SHARD, Axis

Kind = Literal["updates", "data", "setting", "random", "gradient", "state", "parameter", "buffer"]
COMPARED: Final = frozenset({Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.CP, Axis.TP})
"""Axes along which values can be equal; pipeline stages hold different layers."""
_AXES: Final = frozenset(str(axis) for axis in Axis)
_PLAIN: Final = frozenset({Tensor, nn.Parameter})
_STATISTICS: Final = frozenset({"running_mean", "running_var", "num_batches_tracked"})


@dataclass(frozen=True, slots=True)
class ComparedTensor:
    """One value that must be equal on ranks that differ only along `axes`."""

    kind: Kind
    name: str
    axes: frozenset[Axis]
    said: str = ""
    """The value as text, if it is short."""
    statistics: bool = False
    """True for running statistics of a normalisation layer, which torch can maintain separately on each rank."""

    layout: str = ""
    """Shape and dtype of a tensor; empty for other values."""

    @property
    def has_tensor(self) -> bool:
        """True if the entry is a tensor, not a number."""
        return bool(self.layout)

    @property
    def digest(self) -> int:
        """A 64-bit hash of everything but the tensor's contents."""
        return _digest(f"{self.kind} {self.name} {self.said} {self.layout}")


Held = tuple[ComparedTensor, Tensor | None]
"""An entry with its tensor, if any; entries are stored, tensors are not."""


@dataclass(slots=True)
class Replicas:
    """The entries of a run, collected at each check because models, states and loaders change."""

    prepared: PreparedObjects
    clock: StepClock
    ignored: Sequence[str] = ()
    """Patterns of names that are not compared."""
    forgiven: set[tuple[str, str]] = field(default_factory=set)
    """Kind and name of differences that were already reported."""
    matched: set[str] = field(default_factory=set)
    """Patterns that have matched a name."""
    random: bool = False
    """True if ranks share random numbers, in which case generators are compared as well."""

    def entries(self) -> list[Held]:
        """Return all values that must be equal, in an order that is the same on all ranks."""
        if not self.forgiven:
            return list(self._all())
        return [held for held in self._all() if (held[0].kind, held[0].name) not in self.forgiven]

    def _all(self) -> Iterator[Held]:
        done = f"{self.clock.num_updates} updates, {self.clock.num_passes} backward passes"
        yield ComparedTensor("updates", "updates for each backward pass", COMPARED, said=done), None
        for number, cursor in enumerate(self.clock.loaders.active()):
            said = f"epoch {cursor.epoch}, batch {cursor.batch}"
            yield ComparedTensor("data", f"position of loader {number}", COMPARED, said=said), None
        if self.random and any(may_draw(model) for model in self.prepared.models):
            yield from _tensor("random", "generator of the CPU", frozenset({Axis.TP}), torch.get_rng_state())
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it untyped
                yield from _tensor("random", "generator of the GPU", frozenset({Axis.TP}), torch.cuda.get_rng_state())
        names: dict[int, tuple[str, frozenset[Axis]]] = {}
        for position, model in enumerate(self.prepared.models):
            prefix = f"model[{position}]." if position else ""
            yield from self._model(model, prefix, names)
        for position, optimizer in enumerate(self.prepared.optimizers):
            prefix = f"optimizer[{position}]." if position else ""
            yield from self._optimizer(optimizer, prefix, names)

    def _model(self, model: nn.Module, prefix: str, names: dict[int, tuple[str, frozenset[Axis]]]) -> Iterator[Held]:
        apart, copied = _left_alone(model)
        for plain, parameter in named_parameters(model):
            name = prefix + plain
            if id(parameter) in names or plain in apart or self._ignores(name, plain):
                continue
            axes = axes_of(parameter)
            names[id(parameter)] = name, axes
            yield from _tensor("parameter", name, axes, parameter)
            if parameter.grad is not None:
                yield from _tensor("gradient", name, axes, parameter.grad)
        for plain, buffer, statistics in _buffers(model, copied):
            name = prefix + plain
            if plain not in apart and not self._ignores(name, plain):
                yield from _tensor("buffer", name, axes_of(buffer), buffer, statistics)

    def _optimizer(
        self, optimizer: PreparedOptimizer, prefix: str, names: Mapping[int, tuple[str, frozenset[Axis]]]
    ) -> Iterator[Held]:
        inner = optimizer.optimizer
        if isinstance(inner, EngineOptimizer) or _divides_state(inner):
            return  # each rank holds a different shard of the state
        for number, group in enumerate(inner.param_groups):
            where = f"{prefix}param_groups[{number}]"
            for option, value in group.items():
                if isinstance(value, Tensor):
                    yield from _tensor("setting", f"{where}[{option!r}]", COMPARED, value)
                elif option != "params" and _is_plain(value):
                    yield ComparedTensor("setting", f"{where}[{option!r}]", COMPARED, said=repr(value)), None
            for parameter in group["params"]:
                if id(parameter) not in names:
                    continue  # excluded, or not a parameter of a prepared model
                name, axes = names[id(parameter)]
                for key, value in inner.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        yield from _tensor("state", f"{prefix}{name} ({key})", axes, value)

    def _ignores(self, *names: str) -> bool:
        for pattern in self.ignored:
            if any(fnmatch.fnmatchcase(name, pattern) for name in names):
                self.matched.add(pattern)
                return True
        return False


@lru_cache(maxsize=1 << 14)  # a pure function of names, which recur in every check
def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=1 << 10)  # a pure function of shapes, which recur in every check
def _layout(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{shape} {dtype}"


def axes_of(tensor: Tensor) -> frozenset[Axis]:
    """Return the axes along which all ranks hold the same shard of the tensor: all axes, unless it is sharded."""
    if type(tensor) in _PLAIN and not vars(tensor):
        return COMPARED
    axes = set(COMPARED)
    if is_dtensor(tensor):
        mesh_axes = tensor.device_mesh.mesh_dim_names or [""] * len(tensor.placements)  # a mesh of the user's
        for name, placement in zip(mesh_axes, tensor.placements, strict=True):
            if not isinstance(placement, placements().Replicate):
                # An axis of a separate mesh divides experts among data-parallel ranks.
                axes.difference_update({Axis(name)} if name in _AXES else BATCH)
                if name == Axis.DP_SHARD:  # ranks of one sequence hold different shards
                    axes.difference_update(SHARD)
    elif getattr(tensor, "tensor_model_parallel", False):  # megatron-core's mark of a tensor-parallel shard
        axes.discard(Axis.TP)
    if not getattr(tensor, "allreduce", True):
        # megatron-core's mark of an expert, which only some data-parallel ranks hold
        axes.difference_update(BATCH, {Axis.CP, Axis.TP})
    return frozenset(axes)


def _tensor(kind: Kind, name: str, axes: frozenset[Axis], tensor: Tensor, statistics: bool = False) -> Iterator[Held]:
    """Yield the entries of a tensor, or of its inner tensors; nothing for a tensor without memory."""
    plain: Any = tensor  # Any: subclasses of several packages
    if type(tensor) not in _PLAIN:
        plain = tensor.detach()
        if is_dtensor(plain):
            plain = plain.to_local()
    if plain.is_meta or plain.layout is not torch.strided:
        return
    if type(plain) not in _PLAIN and hasattr(plain, "__tensor_flatten__"):
        for part in plain.__tensor_flatten__()[0]:
            yield from _tensor(kind, f"{name}.{part}", axes, getattr(plain, part), statistics)
        return
    yield (
        ComparedTensor(kind, name, axes, statistics=statistics, layout=_layout(tuple(plain.shape), plain.dtype)),
        plain,
    )


def _left_alone(model: nn.Module) -> tuple[frozenset[str], frozenset[int]]:
    """Return names that DDP does not synchronise, and modules whose buffers it broadcasts before each forward."""
    apart: set[str] = set()
    copied: set[int] = set()
    for outer, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            start = canonical_name(f"{outer}.module" if outer else "module", model)
            apart.update(f"{start}.{name}" if start else name for name in module.parameters_to_ignore)
            if module.broadcast_buffers:
                copied.update(id(inner) for inner in module.modules())
    return frozenset(apart), frozenset(copied)


def _buffers(model: nn.Module, copied: Iterable[int]) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield persistent buffers that are not synchronised; non-persistent buffers are caches."""
    for outer, module in model.named_modules():
        if id(module) in copied:
            continue
        for leaf, buffer in own_buffers(module, persistent_only=True):
            name = canonical_name(f"{outer}.{leaf}" if outer else leaf, model)
            yield name, buffer, leaf in _STATISTICS and hasattr(module, "track_running_stats")


def _divides_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer shards its state over ranks: torch's ZeroRedundancyOptimizer."""
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
