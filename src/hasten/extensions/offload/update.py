"""The optimizer step with state in host memory: pieces are streamed to the device, updated there, and streamed back.

An update runs in the user's optimizer on the device, one piece of its parameters after the other, so that its results are those of a step
over all of them. Pieces are fetched ahead during the backward pass, into memory that activations have left, and written back while the next
forward runs. All order is by events; the host never waits, except before it reads the state.
"""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten.errors import StepError
from hasten.extensions.offload.memory_budget import MemoryBudget, MemoryUse
from hasten.extensions.offload.pieces import (
    Flight,
    HostParameters,
    OffDevice,
    StateKey,
    UpdatePiece,
    call_weakly,
    divide_into_pieces,
    hide_tensors,
    lay_out_tensors,
    num_bytes,
    show_tensors,
    sort_like_groups,
)
from hasten.modules.names import is_dtensor, like_parameter, local_tensor
from hasten.optim.engine import list_groups_of_parameters, list_parameters
from hasten.optim.optimizer import SETTLE_STATE
from hasten.runtime.host_pool import HostPool
from hasten.runtime.streams import HostLanes, Mark

_NUM_AHEAD: Final = 2  # pieces fetched while one is updated
_NUM_FLOOR_PIECES: Final = 2 + _NUM_AHEAD  # and one that is written back
# AdamW's, until the first update has shown the optimizer's own
_STATE_PER_PARAMETER: Final = 2.0


class StreamedUpdate:
    """Step hooks of one optimizer that update its parameters in pieces, and leave none to the step itself."""

    def __init__(
        self,
        optimizer: Optimizer,
        lanes: HostLanes,
        use: MemoryUse | None = None,
        is_boundary: Callable[[], bool] = lambda: True,
        most_bytes: int | None = None,
        moves_state: bool = True,
        parameters: HostParameters | None = None,
    ) -> None:
        """Stream the state of `optimizer` over `lanes`.

        `boundary` returns whether a backward is the last one before an update; `parameters` finds those that are in host memory, by default
        the ones that are not on the device.
        """
        self._optimizer = optimizer
        self._lanes = lanes
        self._boundary = is_boundary
        self._most_bytes = most_bytes
        self._moves_state = moves_state
        self._parameters: HostParameters = parameters or OffDevice(lanes.device)
        self._budget = MemoryBudget(0, use)
        self._pool = HostPool(pinned=lanes.device.type != "cpu")
        self._reserved = False
        self._ratio = _STATE_PER_PARAMETER
        self._pieces: list[UpdatePiece] = []
        self._planned: list[int] = []
        self._handles: list[Any] = []  # Any: torch's handles of hooks
        self._leaving: deque[UpdatePiece] = deque()
        # on the device, with state to be written after all parameters
        self._unsent: list[UpdatePiece] = []
        self._parameters_written: Mark = None
        self._params: list[list[Tensor]] | None = None
        self._arrived = 0  # gradients since the last update, of those with a hook
        # pieces that were not on the device when the first of them arrived
        self._missing = 0
        self.drains_in_forward = False
        """True if `before_block` is called in the forward, so that pieces may still be written back then."""
        self._divide_groups()
        optimizer.register_step_pre_hook(self._before_step)
        after_step_hook = optimizer.register_step_post_hook(self._after_step)
        # torch types it as a dict
        post_hooks = cast(
            "OrderedDict[int, object]", optimizer._optimizer_step_post_hooks
        )
        post_hooks.move_to_end(
            after_step_hook.id, last=False
        )  # before hooks that read the parameters
        optimizer.register_state_dict_pre_hook(lambda _: self.settle())
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        # the next update moves them to host memory
        optimizer.register_load_state_dict_post_hook(show_tensors)
        vars(optimizer)[SETTLE_STATE] = self.release
        vars(optimizer)["state_room"] = self._state_room

    # -- planning ---------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def _divide_groups(self) -> None:
        """Divide the groups into pieces, again if parameters were added since."""
        groups = self._optimizer.param_groups
        parameter_ids = list(map(id, list_parameters(groups)))
        if parameter_ids == self._planned:
            return
        self.release()
        for handle in self._handles:
            handle.remove()
        self._planned = parameter_ids
        self._pieces = divide_into_pieces(groups, self._most_bytes)
        largest_bytes = max(
            (piece.parameter_bytes for piece in self._pieces), default=0
        )
        self._budget.floor_bytes = int(_NUM_FLOOR_PIECES * largest_bytes * self._ratio)
        self._handles = []
        # Python's collector does not follow references through hooks of a tensor, so they must not own the update
        gradient_arrived = call_weakly(self._gradient_arrived)
        for piece in self._pieces:
            first = piece.parameters[0]
            if first.requires_grad and first.is_leaf:
                gradient_hook = first.register_post_accumulate_grad_hook(
                    gradient_arrived
                )  # type: ignore[no-untyped-call]  # untyped in torch
                self._handles.append(gradient_hook)

    @property
    def held_bytes(self) -> int:
        """Device memory of the pieces that are on the device."""
        return sum(
            piece.flight.num_bytes for piece in self._pieces if piece.flight is not None
        )

    # -- ahead of the update ------------------------------------------------------------------------------------------
    @torch.no_grad()
    def _gradient_arrived(self, parameter: Tensor) -> None:
        """Fetch the first pieces of the coming update while the backward runs.

        They are spread over the backward: at once, they would delay the parameters of blocks, which are fetched over the same link.
        """
        if not self._boundary():
            return
        self._budget.record_use(self.held_bytes)
        missing_pieces = [piece for piece in self._pieces if piece.flight is None]
        if not self._arrived:
            self._missing = len(missing_pieces)
        self._arrived += 1
        num_fetched = self._missing - len(missing_pieces)
        num_due = math.ceil(self._missing * self._arrived / len(self._handles))
        for piece in missing_pieces[: max(0, num_due - num_fetched)]:
            if piece.home is None or not piece.is_current(self._optimizer.state):
                return
            if not self._budget.fits_ahead(
                self.held_bytes, self._expected_bytes(piece)
            ):
                return
            self._fetch_piece(piece)

    def before_block(self) -> None:
        """Let go of written pieces as far as the activations of the next block need their memory."""
        self._lanes.follow_current_stream()
        held_bytes = self.held_bytes
        self._budget.record_use(held_bytes, in_forward=True)
        while held_bytes and self._budget.is_tight(held_bytes):
            piece = self._leaving[0] if self._leaving else self._last_fetched()
            assert piece is not None, "a piece is held"
            self._let_go(piece)
            held_bytes = self.held_bytes

    def _last_fetched(self) -> UpdatePiece | None:
        """Return the piece on the device that the next update needs last."""
        for piece in reversed(self._pieces):
            if piece.flight is not None:
                return piece
        return None

    # -- the update -------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:  # Any: step()'s
        # the first argument is the optimizer
        if len(args) > 1 or kwargs.get("closure") is not None:
            raise StepError(
                f"{type(optimizer).__name__}.step(closure) is not supported with offload: the update starts before the closure would compute "
                "the gradients. Call backward() and step() instead, or leave offload out."
            )
        self._divide_groups()
        self._lanes.follow_current_stream()
        self._parameters.rest(list_parameters(optimizer.param_groups))
        due_pieces = []
        for piece in self._pieces:
            if any(parameter.grad is not None for parameter in piece.parameters):
                due_pieces.append(piece)
        groups = optimizer.param_groups
        group_parameters = [list(group["params"]) for group in groups]
        try:
            for piece_index, piece in enumerate(due_pieces):
                self._fetch_for_update(
                    due_pieces[piece_index : piece_index + 1 + _NUM_AHEAD]
                )
                self._update_piece(piece)
                self._store_piece(piece)
        finally:
            optimizer.param_groups = groups
            for group, original_parameters in zip(
                groups, group_parameters, strict=True
            ):
                group["params"] = original_parameters
        sort_like_groups(optimizer)
        self._send_deferred()
        # any code may read parameters in host memory
        self._lanes.host_waits(self._parameters_written)
        self._parameters_written = None
        self._budget.end_step()
        self._arrived = 0
        while (
            not self.drains_in_forward
            and self._leaving
            and self.held_bytes > self._budget.floor_bytes
        ):
            self._let_go(self._leaving[0])
        self._params = group_parameters
        for group in groups:
            group["params"] = []

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Restore the parameters of the groups."""
        for group, original_parameters in zip(
            optimizer.param_groups, self._params or [], strict=True
        ):
            group["params"] = original_parameters
        self._params = None

    def _fetch_for_update(self, coming_pieces: Sequence[UpdatePiece]) -> None:
        """Fetch the first piece, and the following ones as far as there is memory."""
        for piece in coming_pieces:
            flight = piece.flight
            if flight is None or flight.leaving:
                more_bytes = self._expected_bytes(piece) if flight is None else 0
                # also sends them
                while self._leaving and not self._budget.fits_in_update(
                    self.held_bytes, more_bytes
                ):
                    self._let_go(self._leaving[0])
                if piece is not coming_pieces[0] and not self._budget.fits_in_update(
                    self.held_bytes, more_bytes
                ):
                    return
                self._fetch_piece(piece)
            self._fetch_gradients(piece)

    def _expected_bytes(self, piece: UpdatePiece) -> int:
        parameter_bytes = sum(
            num_bytes(parameter)
            for parameter in piece.parameters
            if self._parameters.memory(parameter) is not None
        )
        if not self._moves_state:
            return parameter_bytes
        if piece.home is None:
            return parameter_bytes + int(self._ratio * piece.parameter_bytes)
        return parameter_bytes + piece.home.numel()

    def _fetch_piece(self, piece: UpdatePiece) -> None:
        """Start the copies of a piece to the device."""
        if piece.flight is not None:  # written back, but still on the device
            piece.flight.leaving = False
            self._leaving.remove(piece)
            return
        flight = piece.flight = Flight()
        copy_pairs: list[tuple[Tensor, Tensor]] = []
        if self._moves_state:
            self._fetch_state(piece, flight, copy_pairs)
        for index, parameter in enumerate(piece.parameters):
            host_memory = self._parameters.memory(parameter)
            if host_memory is not None:
                flight.parameters[index] = self._room_like(host_memory)
                flight.num_bytes += num_bytes(host_memory)
                copy_pairs.append((flight.parameters[index], host_memory))
        if copy_pairs:
            flight.arrived = self._lanes.fetch(
                copy_pairs, self._lanes.mark(), piece.written
            )
        else:
            flight.arrived = None

    def _fetch_state(
        self,
        piece: UpdatePiece,
        flight: Flight,
        copy_pairs: list[tuple[Tensor, Tensor]],
    ) -> None:
        if piece.home is not None and piece.is_current(self._optimizer.state):
            flight.memory = self._lanes.empty(piece.home.numel())
            flight.state = {slot.key: slot.view(flight.memory) for slot in piece.slots}
            flight.num_bytes += piece.home.numel()
            copy_pairs.append((flight.memory, piece.home))
            return
        # the state is new, or was loaded by other code
        for index, parameter in enumerate(piece.parameters):
            for state_name, state_value in self._optimizer.state.get(
                parameter, {}
            ).items():
                if isinstance(state_value, Tensor) and state_value.ndim:
                    local_values = local_tensor(state_value).detach()
                    if (
                        local_values.device.type != self._lanes.device.type
                        or piece.home is not None
                    ):
                        flight.state[index, state_name] = self._room_like(local_values)
                        copy_pairs.append(
                            (flight.state[index, state_name], local_values)
                        )
                    else:
                        flight.state[index, state_name] = local_values
                    flight.num_bytes += num_bytes(local_values)

    def _room_like(self, tensor: Tensor) -> Tensor:
        state_slots, num_bytes = lay_out_tensors({(0, ""): tensor})
        return state_slots[0].view(self._lanes.empty(num_bytes))

    def _fetch_gradients(self, piece: UpdatePiece) -> None:
        """Fetch gradients in host memory, where FSDP2 reduces those of offloaded parameters to."""
        flight = piece.flight
        assert flight is not None, "the piece is on the device"
        if flight.gradients:
            return
        copy_pairs: list[tuple[Tensor, Tensor]] = []
        for index, parameter in enumerate(piece.parameters):
            if (
                parameter.grad is not None
                and parameter.grad.device.type != self._lanes.device.type
            ):
                local_gradient = local_tensor(parameter.grad).detach()
                flight.gradients[index] = self._room_like(local_gradient)
                flight.num_bytes += num_bytes(local_gradient)
                copy_pairs.append((flight.gradients[index], local_gradient))
        if copy_pairs:
            flight.graded = self._lanes.fetch(copy_pairs, self._lanes.mark())

    def _update_piece(self, piece: UpdatePiece) -> None:
        """Run the optimizer's step over one piece on the device."""
        optimizer = self._optimizer
        flight = piece.flight
        assert flight is not None, "the piece is on the device"
        self._lanes.compute_waits(flight.arrived)
        self._lanes.compute_waits(flight.graded)
        stand_ins = []
        for index, parameter in enumerate(piece.parameters):
            if parameter.grad is not None:
                stand_in = self._stand_in(index, parameter, flight)
                stand_ins.append((index, parameter, stand_in))
        all_groups = optimizer.param_groups
        piece_group = all_groups[piece.group]
        held_states = [
            optimizer.state.get(parameter, {}) for _, parameter, _ in stand_ins
        ]
        for (index, _, stand_in), held_state in zip(
            stand_ins, held_states, strict=True
        ):
            if held_state:
                stand_in_state = {}
                for state_name, state_value in held_state.items():
                    stand_in_state[state_name] = self._to_usable(
                        flight.state.get((index, state_name), state_value), piece_group
                    )
                optimizer.state[stand_in] = stand_in_state
        piece_group["params"] = [stand_in for _, _, stand_in in stand_ins]
        optimizer.param_groups = [piece_group]
        try:
            # without hooks, which run once per step
            inspect.unwrap(type(optimizer).step)(optimizer)
            held_states = [
                self._between_updates(optimizer.state[stand_in], parameter)
                for _, parameter, stand_in in stand_ins
            ]
        finally:
            optimizer.param_groups = all_groups
            for (_, parameter, stand_in), held_state in zip(
                stand_ins, held_states, strict=True
            ):
                if stand_in is not parameter:
                    optimizer.state.pop(stand_in, None)
                if held_state or parameter in optimizer.state:
                    optimizer.state[parameter] = held_state

    # Any: a value of any optimizer's state
    def _to_usable(self, state_value: Any, group: dict[str, Any]) -> Any:
        """Return a value of the state as the update needs it: local, and on the device unless it is a counter of the host."""
        if not isinstance(state_value, Tensor) or not (
            state_value.ndim or _counts_on_device(group)
        ):
            return state_value
        return local_tensor(state_value).to(self._lanes.device)

    # Any: any optimizer's state
    def _between_updates(
        self, updated_state: dict[str, Any], parameter: Tensor
    ) -> dict[str, Any]:
        """Return the state after an update as it is held between updates; `_store` moves tensors to host memory."""
        if self._moves_state or not is_dtensor(parameter):
            return updated_state
        usable_state = {}
        for state_name, state_value in updated_state.items():
            if isinstance(state_value, Tensor) and state_value.ndim:
                state_value = like_parameter(state_value, parameter)
            usable_state[state_name] = state_value
        return usable_state

    def _stand_in(self, index: int, parameter: Tensor, flight: Flight) -> Tensor:
        """Return the tensor that the optimizer updates: the parameter, or its local memory on the device."""
        fetched_values = flight.parameters.get(index)
        if fetched_values is None and not is_dtensor(parameter):
            return parameter
        if fetched_values is None:
            local_values = local_tensor(parameter).detach()
        else:
            local_values = fetched_values
        stand_in = nn.Parameter(local_values, requires_grad=False)
        assert parameter.grad is not None, "it has a gradient"
        grad = flight.gradients.get(index)
        stand_in.grad = local_tensor(parameter.grad).detach() if grad is None else grad
        return stand_in

    # -- back to host memory ------------------------------------------------------------------------------------------
    def _store_piece(self, piece: UpdatePiece) -> None:
        """Start the copies of an updated piece to host memory."""
        flight = piece.flight
        assert flight is not None, "the piece is on the device"
        copy_pairs: list[tuple[Tensor, Tensor]] = []
        for index, device_values in flight.parameters.items():
            host_memory = self._parameters.memory(piece.parameters[index])
            assert host_memory is not None, "it came from there"
            copy_pairs.append((host_memory, device_values))
        flight.num_bytes -= sum(map(num_bytes, flight.gradients.values()))
        flight.gradients = {}
        if copy_pairs:
            piece.written = flight.written = self._parameters_written = (
                self._lanes.store(copy_pairs)
            )
        if self._moves_state:
            flight.unsent = self._store_state(piece, flight)
        elif not copy_pairs:
            piece.flight = None
            return
        flight.leaving = True
        self._leaving.append(piece)
        self._unsent.append(piece)
        if not flight.parameters:
            self._send_deferred()

    def _send_deferred(self) -> None:
        """Start the copies of state that were deferred, so that parameters, which the host waits for, are written first."""
        for piece in self._unsent:
            if piece.flight is not None and piece.flight.unsent:
                piece.written = piece.flight.written = self._lanes.store(
                    piece.flight.unsent
                )
                piece.flight.unsent = []
        self._unsent = []

    def _store_state(
        self, piece: UpdatePiece, flight: Flight
    ) -> list[tuple[Tensor, Tensor]]:
        """Make views of host memory the optimizer's state, and return the copies that fill them."""
        updated_tensors = self._updated_tensors(piece)
        state_slots, size = lay_out_tensors(updated_tensors)
        if (
            flight.memory is not None
            and state_slots == piece.slots
            and self._in_place(flight, updated_tensors)
        ):
            assert piece.home is not None, "its state came from there"
            copy_pairs = [(piece.home, flight.memory)]
        else:
            if piece.home is None or state_slots != piece.slots:
                self._learn_ratio(sum(map(num_bytes, updated_tensors.values())), piece)
                piece.home = self._pool.cut_bytes(size)[2]
                piece.slots = state_slots
            flight.memory = None
            flight.state = updated_tensors
            flight.num_bytes = sum(
                map(num_bytes, (*updated_tensors.values(), *flight.parameters.values()))
            )
            copy_pairs = []
            for slot in state_slots:
                copy_pairs.append((slot.view(piece.home), updated_tensors[slot.key]))
        assert piece.home is not None, "just allocated"
        known_views = piece.resting if flight.memory is not None else {}
        piece.resting = {}
        for slot in piece.slots:
            index, state_name = slot.key
            parameter = piece.parameters[index]
            resting_view = known_views.get(slot.key)
            if resting_view is None:
                piece.resting[slot.key] = like_parameter(
                    slot.view(piece.home), parameter
                )
            else:
                piece.resting[slot.key] = resting_view
            self._optimizer.state[parameter][state_name] = piece.resting[slot.key]
        return copy_pairs

    def _updated_tensors(self, piece: UpdatePiece) -> dict[StateKey, Tensor]:
        """Return the piece's state tensors on the device after the update; those of parameters without gradient as fetched."""
        updated_tensors: dict[StateKey, Tensor] = {}
        flight = piece.flight
        assert flight is not None, "the piece is on the device"
        for index, parameter in enumerate(piece.parameters):
            for state_name, state_value in self._optimizer.state.get(
                parameter, {}
            ).items():
                if isinstance(state_value, Tensor) and state_value.ndim:
                    fetched_tensor = flight.state.get((index, state_name))
                    is_unchanged = parameter.grad is None and fetched_tensor is not None
                    if is_unchanged and fetched_tensor is not None:
                        updated_tensors[index, state_name] = fetched_tensor
                    else:
                        updated_tensors[index, state_name] = local_tensor(
                            state_value
                        ).detach()
        return updated_tensors

    @staticmethod
    def _in_place(flight: Flight, updated_tensors: dict[StateKey, Tensor]) -> bool:
        """Return whether the optimizer has updated the fetched tensors, not replaced them."""
        return all(
            updated_tensors[state_key] is fetched_tensor
            or updated_tensors[state_key].data_ptr() == fetched_tensor.data_ptr()
            for state_key, fetched_tensor in flight.state.items()
        )

    def _learn_ratio(self, state_bytes: int, piece: UpdatePiece) -> None:
        """Note the size of the first state that is seen, and reserve host memory for all of it."""
        if not self._reserved and piece.parameter_bytes:
            self._reserved = True
            self._ratio = state_bytes / piece.parameter_bytes
            piece_sizes = [
                planned_piece.parameter_bytes for planned_piece in self._pieces
            ]
            self._budget.floor_bytes = int(
                _NUM_FLOOR_PIECES * max(piece_sizes) * self._ratio
            )
            self._pool.reserve_bytes(int(sum(piece_sizes) * self._ratio))

    def _let_go(self, piece: UpdatePiece) -> None:
        """Free the device memory of a piece, for work of the compute stream that follows its copies."""
        flight = piece.flight
        assert flight is not None, "the piece is on the device"
        if flight.unsent:
            self._send_deferred()
        self._lanes.compute_waits(flight.written if flight.leaving else flight.arrived)
        if flight.leaving:
            self._leaving.remove(piece)
        piece.flight = None

    # -- state that other code reads and loads ------------------------------------------------------------------------
    def settle(self) -> None:
        """Wait until the state in host memory is current."""
        self._send_deferred()
        for piece in self._leaving:
            self._lanes.host_waits(piece.written)

    def release(self) -> None:
        """Wait until the state in host memory is current, and drop the copies on the device, so that it may be changed there."""
        self.settle()
        for piece in self._pieces:
            if piece.flight is not None:
                self._let_go(piece)

    def _state_room(
        self,
        parameter: Tensor,
        state_name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the memory to load a state tensor into: existing memory if it fits, else new memory, not on the device if offloaded."""
        known_tensor = None
        if state_name:
            known_tensor = self._optimizer.state.get(parameter, {}).get(state_name)
        if (
            isinstance(known_tensor, Tensor)
            and tuple(known_tensor.shape) == shape
            and known_tensor.dtype == dtype
        ):
            return known_tensor
        groups = self._optimizer.param_groups
        parameter_ids = list(map(id, list_parameters(groups)))
        group_index = parameter_ids.index(id(parameter))
        group = list_groups_of_parameters(groups)[group_index]
        if shape == ():
            is_offloaded = not _counts_on_device(group)
        else:
            is_offloaded = self._moves_state
        state_device = torch.device("cpu") if is_offloaded else self._lanes.device
        if shape == () or shape != tuple(parameter.shape):
            return torch.empty(shape, dtype=dtype, device=state_device)
        with torch.no_grad():
            return like_parameter(
                torch.empty(
                    local_tensor(parameter).shape, dtype=dtype, device=state_device
                ),
                parameter,
            )

    # Any: a state dict
    def _before_load(
        self, optimizer: Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Hide tensors from torch, which would move all of them to the device."""
        self.release()
        if not self._moves_state:
            return state_dict
        return {**state_dict, "state": hide_tensors(state_dict["state"])}


def _counts_on_device(group: Mapping[str, Any]) -> bool:  # Any: an optimizer's group
    return bool(group.get("fused") or group.get("capturable"))
