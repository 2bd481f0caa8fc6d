"""Pieces of an optimizer: parameters that are updated together, and the host memory of their state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, ParamSpec, Protocol
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.optim import Optimizer

from hasten.modules.names import local_tensor
from hasten.optim.engine import list_parameters
from hasten.runtime.host_pool import aligned_bytes
from hasten.runtime.streams import Mark

MOST_PIECE_BYTES: Final = 128 * 1024**2
"""Largest parameters of a piece; its state under AdamW is twice as large."""
# small models are divided as well, so that most of their state is in host memory
_LEAST_NUM_PIECES: Final = 32

Arguments = ParamSpec("Arguments")
StateKey = tuple[int, str]
"""Index of a parameter in its piece, and key in its state."""


@dataclass(frozen=True, slots=True)
class StateSlot:
    """Place of one state tensor in the memory of its piece."""

    key: StateKey
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def view(self, memory: Tensor) -> Tensor:
        """Return the tensor in a piece's memory."""
        item_bytes = self.dtype.itemsize
        num_elements = 0
        if _has_elements(self):
            num_elements = 1 + sum(
                (dim_size - 1) * dim_stride
                for dim_size, dim_stride in zip(self.shape, self.stride, strict=True)
            )
        flat_memory = memory[self.start : self.start + num_elements * item_bytes].view(
            self.dtype
        )
        return flat_memory.as_strided(self.shape, self.stride)


def _has_elements(slot: StateSlot) -> bool:
    return 0 not in slot.shape


@dataclass(slots=True)
class Flight:
    """A piece's state on the device."""

    num_bytes: int = 0
    memory: Tensor | None = None
    """One block of memory with all tensors; None while the tensors have memory of their own."""
    state: dict[StateKey, Tensor] = field(default_factory=dict)
    parameters: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    arrived: Mark = None
    graded: Mark = None
    """Mark of the gradients' copies to the device."""
    written: Mark = None
    unsent: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Copies to host memory that have not been queued yet."""
    leaving: bool = False
    """True once the update has changed it and it is being written to host memory."""


class HostParameters(Protocol):
    """Parameters in host memory, whose update runs on the device."""

    def memory(self, parameter: Tensor) -> Tensor | None:
        """Return the host memory of a parameter; None for one that is on the device."""
        ...

    def rest(self, parameters: Iterable[Tensor]) -> None:
        """Drop other copies of the parameters before they are updated in host memory."""
        ...


class OffDevice:
    """Parameters whose local memory is not on the device, such as those that FSDP2 offloads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def memory(self, parameter: Tensor) -> Tensor | None:
        """Return a parameter's local memory if it is not on the device."""
        local_values = local_tensor(parameter).detach()
        return None if local_values.device.type == self._device.type else local_values

    def rest(self, parameters: Iterable[Tensor]) -> None:
        """Do nothing: FSDP2 keeps no copies between passes."""


@dataclass(slots=True, eq=False)
class UpdatePiece:
    """Parameters of one group that are updated together, with the host memory of their state."""

    group: int
    parameters: list[Tensor]
    slots: tuple[StateSlot, ...] = ()
    home: Tensor | None = None
    resting: dict[StateKey, Tensor] = field(default_factory=dict)
    """The tensors in the optimizer's state while the piece is in host memory: views of `home`, as DTensors if sharded."""
    flight: Flight | None = None
    written: Mark = None
    """Mark of the last copy to `home`."""

    @property
    def parameter_bytes(self) -> int:
        """Bytes of this rank's parameters."""
        return sum(map(num_bytes, self.parameters))

    # Any: any optimizer's state
    def is_current(self, state: Mapping[Tensor, Mapping[str, Any]]) -> bool:
        """Return whether the optimizer's state is still what was stored in `home`."""
        return self.home is not None and all(
            state.get(self.parameters[index], {}).get(state_name) is tensor
            for (index, state_name), tensor in self.resting.items()
        )


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes that this rank holds of a tensor."""
    local_values = local_tensor(tensor)
    return local_values.numel() * local_values.element_size()


def divide_into_pieces(
    groups: Sequence[Mapping[str, Any]], most_piece_bytes: int | None = None
) -> list[UpdatePiece]:
    """Return the pieces of an optimizer's groups, those first whose gradients a backward usually computes first."""
    total_bytes = sum(map(num_bytes, list_parameters(groups)))
    max_bytes = most_piece_bytes or min(
        MOST_PIECE_BYTES, total_bytes // _LEAST_NUM_PIECES
    )
    positioned_pieces: list[tuple[float, UpdatePiece]] = []
    for group_index, group in enumerate(groups):
        group_parameters: list[Tensor] = list(group["params"])[::-1]
        num_divided = 0
        for piece_parameters in _split_into_runs(group_parameters, max_bytes):
            positioned_pieces.append(
                (
                    num_divided / len(group_parameters),
                    UpdatePiece(group_index, piece_parameters),
                )
            )
            num_divided += len(piece_parameters)
    positioned_pieces.sort(key=lambda positioned_piece: positioned_piece[0])
    return [piece for position, piece in positioned_pieces]


def _split_into_runs(
    members: Sequence[Tensor], max_bytes: int
) -> Iterator[list[Tensor]]:
    """Yield runs of parameters of at most `limit` bytes together, or single larger ones."""
    parameter_run: list[Tensor] = []
    run_bytes = 0
    for member in members:
        member_bytes = num_bytes(member)
        if parameter_run and run_bytes + member_bytes > max_bytes:
            yield parameter_run
            parameter_run = []
            run_bytes = 0
        parameter_run.append(member)
        run_bytes += member_bytes
    if parameter_run:
        yield parameter_run


def lay_out_tensors(
    tensors: Mapping[StateKey, Tensor],
) -> tuple[tuple[StateSlot, ...], int]:
    """Return the places of tensors in one block of memory, and its size in bytes."""
    state_slots = []
    start_byte = 0
    for state_key, tensor in tensors.items():
        if _is_dense(tensor):
            tensor_stride = tensor.stride()
        else:
            tensor_stride = torch.empty(tensor.shape, device="meta").stride()
        state_slots.append(
            StateSlot(
                state_key,
                start_byte,
                tuple(tensor.shape),
                tuple(tensor_stride),
                tensor.dtype,
            )
        )
        start_byte += aligned_bytes(tensor.numel() * tensor.element_size())
    return tuple(state_slots), start_byte


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements occupy memory without gaps and overlaps."""
    expected_stride = 1
    for dim_stride, dim_size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if dim_size != 1:
            if dim_stride != expected_stride:
                return False
            expected_stride *= dim_size
    return True


def sort_like_groups(optimizer: Optimizer) -> None:
    """Order the state as the groups are, as a step over all parameters creates it, so that checkpoints are the same."""
    optimizer_state = optimizer.state
    parameters = list_parameters(optimizer.param_groups)
    ordered_parameters = list(filter(optimizer_state.__contains__, parameters))
    ordered_ids = list(map(id, ordered_parameters))
    stored_ids = list(map(id, optimizer_state))
    if len(ordered_ids) == len(stored_ids) and ordered_ids != stored_ids:
        ordered_state = []
        for parameter in ordered_parameters:
            ordered_state.append((parameter, optimizer_state[parameter]))
        optimizer_state.clear()
        optimizer_state.update(ordered_state)


class _Hidden:
    """A tensor that `load_state_dict` passes on unchanged."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


# Any: the state of any optimizer
def hide_tensors(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the state of a state dict with its tensors hidden from torch, which would move all of them to the device."""
    hidden_state: dict[Any, Any] = {}
    for parameter_index, parameter_state in state.items():
        hidden_state[parameter_index] = parameter_state
        if isinstance(parameter_state, dict):
            hidden_values = dict(parameter_state)
            for state_name, state_value in parameter_state.items():
                if isinstance(state_value, Tensor) and state_value.ndim:
                    hidden_values[state_name] = _Hidden(state_value)
            hidden_state[parameter_index] = hidden_values
    return hidden_state


def show_tensors(optimizer: Optimizer) -> None:
    """Put hidden tensors into the state of an optimizer, cast as torch casts them."""
    for parameter, parameter_state in optimizer.state.items():
        for state_name, state_value in (
            parameter_state.items() if isinstance(parameter_state, dict) else ()
        ):
            if isinstance(state_value, _Hidden):
                hidden_tensor = state_value.tensor
                is_cast = (
                    parameter.is_floating_point()
                    and hidden_tensor.dtype != parameter.dtype
                )
                if is_cast:
                    hidden_tensor = hidden_tensor.to(parameter.dtype)
                parameter_state[state_name] = hidden_tensor


def call_weakly(method: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Return a function that calls a bound method as long as its object exists, and does not keep it alive."""
    method_reference = WeakMethod(method)

    def call_method(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        bound_method = method_reference()
        if bound_method is not None:
            bound_method(*args, **kwargs)

    return call_method
