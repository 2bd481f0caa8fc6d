"""Measurement of a training step on fake tensors: bytes allocated after every operation, FLOPs, bytes moved."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hasten.trees import tensors

Kind = Literal["activations", "copies", "gradients"]
_ROUND: Final = 512
"""Allocation granularity of GPU allocators, in bytes."""
_CASTS: Final = "aten::_to_copy"
_READ: Final = "aten::_local_scalar_dense"


@dataclass(slots=True)
class Watched:
    """Measurements of a step."""

    alive: list[tuple[int, int, int]] = field(default_factory=list)
    """Bytes of activations, cast parameters and gradients after each operation."""
    flops: dict[str, float] = field(default_factory=dict)
    moved: float = 0.0
    operations: int = 0


class StepWatch(TorchDispatchMode):
    """Dispatch mode that records allocations and their lifetimes. Any in this class: torch's operators."""

    def __init__(self, models: list[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.seen = Watched()
        self._modules = {id(part) for model in models for part in model.modules()}
        self.stack: list[nn.Module] = []
        self._parameters = {
            id(p.untyped_storage()) for model in models for p in model.parameters()
        }
        self._pinned = [
            p.untyped_storage() for model in models for p in model.parameters()
        ]  # an id is valid only while its object is alive
        self._models = models
        self._known: dict[int, tuple[weakref.ref[Any], Kind, int]] = {}
        self._bytes: dict[Kind, int] = {"activations": 0, "copies": 0, "gradients": 0}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Track modules and gradients inside the block."""
        with ExitStack() as stack:
            for handle in (
                module_hooks.register_module_forward_pre_hook(self._enter),
                module_hooks.register_module_forward_hook(
                    self._leave, always_call=True
                ),
            ):
                stack.callback(handle.remove)
            for model in self._models:
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        handle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]  # torch leaves it untyped
                            self._accumulated
                        )
                        stack.callback(handle.remove)
            yield

    def is_parameter(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter, a view of one, or a cast one."""
        key = id(tensor.untyped_storage())
        return key in self._parameters or (
            key in self._known and self._known[key][1] == "copies"
        )

    def count(self, flops: float, dtype: str) -> None:
        """Add operations of a function that is not an operator of torch."""
        name = _short(dtype)
        self.seen.flops[name] = self.seen.flops.get(name, 0.0) + flops

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.name()
        # numbers that the loop reads: any value works, since nothing is computed
        if name.startswith(_READ):
            return 1.0 if args[0].is_floating_point() else 1
        out = func(*args, **kwargs)
        given, made = _flat(args), _flat(out)
        fresh = [tensor for tensor in made if self._is_new(tensor)]
        is_cast = name.startswith(_CASTS) and any(
            id(t.untyped_storage()) in self._parameters for t in given
        )
        for tensor in fresh:
            self._add(tensor, "copies" if is_cast else "activations")
        self._account(func, name, args, kwargs, out, given, made, bool(fresh))
        self.seen.alive.append(
            (
                self._bytes["activations"],
                self._bytes["copies"],
                self._bytes["gradients"],
            )
        )
        return out

    def _account(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        out: Any,
        given: list[Tensor],
        made: list[Tensor],
        new: bool,
    ) -> None:
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None and made:
            self.count(
                float(formula(*args, **kwargs, out_val=out)),
                str(given[0].dtype).removeprefix("torch."),
            )
            self.seen.operations += 1
        # neither a view nor a metadata query
        elif new or name.partition(".")[0].endswith("_"):
            self.seen.moved += sum(_size(tensor) for tensor in (*given, *made))
            self.seen.operations += 1

    def _is_new(self, tensor: Tensor) -> bool:
        key = id(tensor.untyped_storage())
        return key not in self._known and key not in self._parameters

    def _add(self, tensor: Tensor, kind: Kind) -> None:
        storage = tensor.untyped_storage()
        num_bytes = -(-storage.nbytes() // _ROUND) * _ROUND
        key = id(storage)
        if key in self._known:
            return

        def gone(_: object) -> None:
            _, was, amount = self._known.pop(key)
            self._bytes[was] -= amount

        self._known[key] = (weakref.ref(storage, gone), kind, num_bytes)
        self._bytes[kind] += num_bytes

    def _enter(self, module: nn.Module, inputs: object) -> None:
        if id(module) in self._modules:
            self.stack.append(module)

    def _leave(self, module: nn.Module, inputs: object, output: object) -> None:
        if self.stack and self.stack[-1] is module:
            self.stack.pop()

    def _accumulated(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        key = id(parameter.grad.untyped_storage())
        if key in self._known:
            reference, was, amount = self._known[key]
            if was != "gradients":
                self._known[key] = (reference, "gradients", amount)
                self._bytes[was] -= amount
                self._bytes["gradients"] += amount


def _flat(values: Any) -> list[Tensor]:  # Any: arguments or results of an operator
    """Return the tensors among values and lists of values, which covers all operators and is faster than `trees`."""
    if isinstance(values, Tensor):
        return [values]
    if not isinstance(values, (list, tuple)):
        return []
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [inner for inner in value if isinstance(inner, Tensor)]
    return found


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _short(dtype: str) -> str:
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(dtype, dtype)


def fake_copy(model: nn.Module) -> dict[int, nn.Parameter]:
    """Replace a model's parameters and buffers by fake ones in place; return new parameters by id of the old ones."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(
            module.named_parameters(recurse=False, remove_duplicate=False)
        ):
            if id(parameter) not in made:
                empty = torch.empty(
                    parameter.shape, dtype=parameter.dtype, device="cpu"
                )
                made[id(parameter)] = nn.Parameter(
                    empty, requires_grad=parameter.requires_grad
                )
            module.register_parameter(name, made[id(parameter)])
        for name, buffer in list(
            module.named_buffers(recurse=False, remove_duplicate=False)
        ):
            setattr(
                module,
                name,
                torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu"),
            )
    return made


@dataclass(frozen=True, slots=True)
class ModuleRoles:
    """The modules of a model that the planner distinguishes, by id."""

    blocks: frozenset[int] = frozenset()
    block_classes: tuple[str, ...] = ()
    by_rows: frozenset[int] = frozenset()
    """Layers that tensor parallelism splits row-wise; their inputs are split."""


@dataclass(slots=True)
class Saved:
    """Bytes saved for backward, and the sizes of hidden states between blocks."""

    total: int = 0
    split: int = 0
    width: int = 0
    sequence: int = 1


@dataclass(slots=True)
class SavedNotes:
    """Recorder of saved tensors and shapes while a forward runs."""

    watch: StepWatch
    anatomy: ModuleRoles
    saved: Saved = field(default_factory=Saved)
    _seen: dict[int, weakref.ref[Any]] = field(
        default_factory=dict
    )  # Any: storages; strong references would change the peak

    def attention(self, flops: float, dtype: str) -> None:
        """Record an attention: its forward, and a backward with two and a half times as many operations."""
        self.watch.count(3.5 * flops, dtype)

    def entered(self, module: nn.Module, args: object, kwargs: object = None) -> None:
        """Record the shape of the first block's input."""
        if self.saved.width == 0 and id(module) in self.anatomy.blocks:
            first = next(
                (
                    value
                    for value in tensors([args, kwargs])
                    if value.is_floating_point()
                ),
                None,
            )
            if first is not None and first.dim() >= 2:
                self.saved.width = first.shape[-1]
                self.saved.sequence = first.shape[-2] if first.dim() > 2 else 1

    def save(self, tensor: Tensor) -> Tensor:
        """Record a tensor that autograd saves."""
        storage = tensor.untyped_storage()
        known = self._seen.get(id(storage))
        if (known is not None and known() is storage) or self.watch.is_parameter(
            tensor
        ):
            return tensor
        self._seen[id(storage)] = weakref.ref(storage)
        num_bytes = storage.nbytes()
        self.saved.total += num_bytes
        if any(
            id(module) in self.anatomy.blocks for module in self.watch.stack
        ) and self._is_divided(tensor):
            self.saved.split += num_bytes
        return tensor

    def _is_divided(self, tensor: Tensor) -> bool:
        """Return whether tensor parallelism splits this tensor: inputs of row-wise layers, all but hidden states."""
        if self.watch.stack and id(self.watch.stack[-1]) in self.anatomy.by_rows:
            return True
        return tensor.dim() > 3 or tensor.shape[-1:] != (self.saved.width,)
