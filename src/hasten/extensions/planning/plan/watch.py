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

AllocationKind = Literal["activations", "copies", "gradients"]
_ALLOCATION_BYTES: Final = 512
"""Allocation granularity of GPU allocators, in bytes."""
_CAST_OPERATOR: Final = "aten::_to_copy"
_READ_OPERATOR: Final = "aten::_local_scalar_dense"


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
        self.measured = Watched()
        self._modules = {id(module) for model in models for module in model.modules()}
        self.stack: list[nn.Module] = []
        self._parameters = set()
        self._pinned = []  # an id is valid only while its object is alive
        for model in models:
            for parameter in model.parameters():
                storage = parameter.untyped_storage()
                self._parameters.add(id(storage))
                self._pinned.append(storage)
        self._models = models
        self._allocations: dict[int, tuple[weakref.ref[Any], AllocationKind, int]] = {}
        self._bytes: dict[AllocationKind, int] = {
            "activations": 0,
            "copies": 0,
            "gradients": 0,
        }

    @contextmanager
    def track_modules(self) -> Iterator[None]:
        """Track modules and gradients inside the block."""
        with ExitStack() as stack:
            for handle in (
                module_hooks.register_module_forward_pre_hook(self._enter_module),
                module_hooks.register_module_forward_hook(
                    self._leave_module, always_call=True
                ),
            ):
                stack.callback(handle.remove)
            for model in self._models:
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        handle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]  # torch leaves it untyped
                            self._record_accumulation
                        )
                        stack.callback(handle.remove)
            yield

    def is_parameter(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter, a view of one, or a cast one."""
        storage_id = id(tensor.untyped_storage())
        return storage_id in self._parameters or (
            storage_id in self._allocations
            and self._allocations[storage_id][1] == "copies"
        )

    def count_operations(self, flops: float, dtype: str) -> None:
        """Add operations of a function that is not an operator of torch."""
        dtype_name = _short_dtype(dtype)
        self.measured.flops[dtype_name] = (
            self.measured.flops.get(dtype_name, 0.0) + flops
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        operator_name = func.name()
        # numbers that the loop reads: any value works, since nothing is computed
        if operator_name.startswith(_READ_OPERATOR):
            return 1.0 if args[0].is_floating_point() else 1
        operator_output = func(*args, **kwargs)
        input_tensors = _list_tensors(args)
        output_tensors = _list_tensors(operator_output)
        new_tensors = list(filter(self._is_new, output_tensors))
        is_cast = operator_name.startswith(_CAST_OPERATOR) and any(
            id(t.untyped_storage()) in self._parameters for t in input_tensors
        )
        for tensor in new_tensors:
            self._add_allocation(tensor, "copies" if is_cast else "activations")
        self._count_operation(
            func,
            operator_name,
            args,
            kwargs,
            operator_output,
            input_tensors,
            output_tensors,
            bool(new_tensors),
        )
        self.measured.alive.append(
            (
                self._bytes["activations"],
                self._bytes["copies"],
                self._bytes["gradients"],
            )
        )
        return operator_output

    def _count_operation(
        self,
        func: Any,
        operator_name: str,
        args: Any,
        kwargs: Any,
        operator_output: Any,
        input_tensors: list[Tensor],
        output_tensors: list[Tensor],
        has_new_tensors: bool,
    ) -> None:
        flop_formula = flop_registry.get(func.overloadpacket)
        if flop_formula is not None and output_tensors:
            self.count_operations(
                float(flop_formula(*args, **kwargs, out_val=operator_output)),
                str(input_tensors[0].dtype).removeprefix("torch."),
            )
            self.measured.operations += 1
        # neither a view nor a metadata query
        elif has_new_tensors or operator_name.partition(".")[0].endswith("_"):
            self.measured.moved += sum(
                map(_tensor_bytes, (*input_tensors, *output_tensors))
            )
            self.measured.operations += 1

    def _is_new(self, tensor: Tensor) -> bool:
        storage_id = id(tensor.untyped_storage())
        return (
            storage_id not in self._allocations and storage_id not in self._parameters
        )

    def _add_allocation(self, tensor: Tensor, kind: AllocationKind) -> None:
        storage = tensor.untyped_storage()
        num_bytes = -(-storage.nbytes() // _ALLOCATION_BYTES) * _ALLOCATION_BYTES
        storage_id = id(storage)
        if storage_id in self._allocations:
            return

        def forget_storage(_: object) -> None:
            _, last_kind, freed_bytes = self._allocations.pop(storage_id)
            self._bytes[last_kind] -= freed_bytes

        self._allocations[storage_id] = (
            weakref.ref(storage, forget_storage),
            kind,
            num_bytes,
        )
        self._bytes[kind] += num_bytes

    def _enter_module(self, module: nn.Module, inputs: object) -> None:
        if id(module) in self._modules:
            self.stack.append(module)

    def _leave_module(self, module: nn.Module, inputs: object, output: object) -> None:
        if self.stack and self.stack[-1] is module:
            self.stack.pop()

    def _record_accumulation(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        storage_id = id(parameter.grad.untyped_storage())
        if storage_id in self._allocations:
            reference, last_kind, num_bytes = self._allocations[storage_id]
            if last_kind != "gradients":
                self._allocations[storage_id] = (reference, "gradients", num_bytes)
                self._bytes[last_kind] -= num_bytes
                self._bytes["gradients"] += num_bytes


def _list_tensors(
    values: Any,
) -> list[Tensor]:  # Any: arguments or results of an operator
    """Return the tensors among values and lists of values, which covers all operators and is faster than `trees`."""
    if isinstance(values, Tensor):
        return [values]
    if not isinstance(values, (list, tuple)):
        return []
    tensors_in_values: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors_in_values.append(value)
        elif isinstance(value, (list, tuple)):
            tensors_in_values += [inner for inner in value if isinstance(inner, Tensor)]
    return tensors_in_values


def _tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _short_dtype(dtype: str) -> str:
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(dtype, dtype)


def fake_copy(model: nn.Module) -> dict[int, nn.Parameter]:
    """Replace a model's parameters and buffers by fake ones in place; return new parameters by id of the old ones."""
    fake_parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(
            module.named_parameters(recurse=False, remove_duplicate=False)
        ):
            if id(parameter) not in fake_parameters:
                fake_tensor = torch.empty(
                    parameter.shape, dtype=parameter.dtype, device="cpu"
                )
                fake_parameters[id(parameter)] = nn.Parameter(
                    fake_tensor, requires_grad=parameter.requires_grad
                )
            module.register_parameter(name, fake_parameters[id(parameter)])
        for name, buffer in list(
            module.named_buffers(recurse=False, remove_duplicate=False)
        ):
            setattr(
                module,
                name,
                torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu"),
            )
    return fake_parameters


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
    roles: ModuleRoles
    saved: Saved = field(default_factory=Saved)
    _storages: dict[int, weakref.ref[Any]] = field(
        default_factory=dict
    )  # Any: storages; strong references would change the peak

    def record_attention(self, flops: float, dtype: str) -> None:
        """Record an attention: its forward, and a backward with two and a half times as many operations."""
        self.watch.count_operations(3.5 * flops, dtype)

    def record_input(
        self, module: nn.Module, args: object, kwargs: object = None
    ) -> None:
        """Record the shape of the first block's input."""
        if self.saved.width == 0 and id(module) in self.roles.blocks:
            first_input = next(
                (
                    tensor
                    for tensor in tensors([args, kwargs])
                    if tensor.is_floating_point()
                ),
                None,
            )
            if first_input is not None and first_input.dim() >= 2:
                self.saved.width = first_input.shape[-1]
                if first_input.dim() > 2:
                    self.saved.sequence = first_input.shape[-2]
                else:
                    self.saved.sequence = 1

    def record_saved(self, tensor: Tensor) -> Tensor:
        """Record a tensor that autograd saves."""
        storage = tensor.untyped_storage()
        storage_reference = self._storages.get(id(storage))
        if (
            storage_reference is not None and storage_reference() is storage
        ) or self.watch.is_parameter(tensor):
            return tensor
        self._storages[id(storage)] = weakref.ref(storage)
        num_bytes = storage.nbytes()
        self.saved.total += num_bytes
        if any(
            id(module) in self.roles.blocks for module in self.watch.stack
        ) and self._is_divided(tensor):
            self.saved.split += num_bytes
        return tensor

    def _is_divided(self, tensor: Tensor) -> bool:
        """Return whether tensor parallelism splits this tensor: inputs of row-wise layers, all but hidden states."""
        if self.watch.stack and id(self.watch.stack[-1]) in self.roles.by_rows:
            return True
        return tensor.dim() > 3 or tensor.shape[-1:] != (self.saved.width,)
