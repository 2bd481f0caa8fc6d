"""Parameters of repeated blocks in host memory, streamed to the device for the forward and the backward of each block.

Between uses a parameter is an ordinary tensor in host memory. For its use, its data is replaced by a view of one block of device memory, whose
storage is freed afterwards and filled again for the backward: tensors that autograd has saved share that storage and become valid again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from hasten import trees
from hasten.errors import PrepareError
from hasten.extensions.offload.pieces import StateSlot, lay_out_tensors
from hasten.precision.base import Precision
from hasten.runtime.context import ProcessContext
from hasten.runtime.host_pool import HostPool
from hasten.runtime.streams import HostLanes, Mark, lanes_for
from hasten.strategies.base import PrepareRequest, Stage, is_trainable
from hasten.strategies.blocks import repeated_blocks
from hasten.strategies.native import refuse_meta

_HOST_PARAMETER_ATTRIBUTE: Final = "_hasten_host_parameter"
_NUM_AHEAD: Final = 2  # blocks fetched while one computes


class StreamedBlock:
    """Parameters of one block: their host memory, and their device memory while they are in use."""

    def __init__(
        self,
        name: str,
        parameters: Sequence[nn.Parameter],
        pool: HostPool,
        lanes: HostLanes,
    ) -> None:
        self.name = name
        self.parameters = list(parameters)
        self._lanes = lanes
        self.slots: tuple[StateSlot, ...]
        self.slots, self._size = lay_out_tensors(
            {(index, ""): p.detach() for index, p in enumerate(parameters)}
        )
        self._home = pool.cut_bytes(self._size)[2]
        self.homes = [slot.view(self._home) for slot in self.slots]
        self._memory = lanes.empty(self._size)
        self._views = [slot.view(self._memory) for slot in self.slots]
        self._memory.untyped_storage().resize_(0)
        self._arrived: Mark = None
        self._stamp: tuple[int, ...] | None = None
        self.in_use = False
        self.in_backward = False
        for parameter, host_memory in zip(self.parameters, self.homes, strict=True):
            host_memory.copy_(parameter.detach())
            parameter.data = host_memory

    @property
    def fetched(self) -> bool:
        """True if the device memory holds the block, or copies to it are queued."""
        return self._stamp is not None

    def fetch_block(self) -> None:
        """Start the copy of the block to the device."""
        if self._stamp is not None and self._stamp != self._read_versions():
            self.rest()
        if self._stamp is None:
            self._lanes.grow(self._memory, self._size)
            self._stamp = self._read_versions()
            self._arrived = self._lanes.fetch(
                [(self._memory, self._home)], self._lanes.mark()
            )

    def use_on_device(self) -> None:
        """Make the parameters tensors on the device."""
        if self.in_use:
            return
        self.fetch_block()
        self._lanes.compute_waits(self._arrived)
        for parameter, device_view in zip(self.parameters, self._views, strict=True):
            parameter.data = device_view
            gradient = parameter.grad
            if (
                gradient is not None and gradient.device != device_view.device
            ):  # restored from a checkpoint while the block was at rest
                parameter.grad = gradient.to(device_view.device)
        self.in_use = True

    def rest(self) -> None:
        """Make the parameters tensors in host memory again, and free the device memory."""
        if self.in_use:
            for parameter, host_memory in zip(self.parameters, self.homes, strict=True):
                parameter.data = host_memory
        if self._stamp is not None:
            self._lanes.compute_waits(self._arrived)
            self._memory.untyped_storage().resize_(0)
        self.in_use = self.in_backward = False
        self._stamp = None

    def _read_versions(self) -> tuple[int, ...]:
        """Return the version counters of the host memory, which any write increments."""
        return (
            self._home._version,
            *(parameter._version for parameter in self.parameters),
        )


class StreamedWeights:
    """Transform that keeps the parameters of a model's repeated blocks in host memory; the others are on the device."""

    stage = Stage.DISTRIBUTE

    def __init__(self) -> None:
        self._lanes: HostLanes | None = None
        self._pool: HostPool | None = None
        self._models: list[list[StreamedBlock]] = []
        self._ends = False  # True while a backward runs whose end is awaited

    def apply(
        self,
        model: nn.Module,
        request: PrepareRequest,
        ctx: ProcessContext,
        precision: Precision,
    ) -> nn.Module:
        if not request.train or not is_trainable(model):
            return model if not request.place else model.to(ctx.device)
        if self._lanes is None or self._pool is None:
            self._lanes = lanes_for(ctx.device)
            self._pool = HostPool(pinned=ctx.device.type != "cpu")
        streamable_blocks = find_streamable(model)
        num_bytes = 0
        for _, _, block_parameters in streamable_blocks:
            for parameter in block_parameters:
                num_bytes += parameter.numel() * parameter.element_size()
        self._pool.reserve_bytes(num_bytes)
        blocks = []
        for block_name, _, block_parameters in streamable_blocks:
            blocks.append(
                StreamedBlock(block_name, block_parameters, self._pool, self._lanes)
            )
        for index, (block, (_, module, _)) in enumerate(
            zip(blocks, streamable_blocks, strict=True)
        ):
            for parameter, host_memory in zip(
                block.parameters, block.homes, strict=True
            ):
                setattr(
                    parameter,
                    _HOST_PARAMETER_ATTRIBUTE,
                    (host_memory, weakref.ref(self)),
                )
            module.register_forward_pre_hook(
                partial(self._before_forward, blocks, index)
            )
            module.register_forward_hook(
                partial(self._after_forward, blocks, index), always_call=True
            )
        self._models.append(blocks)
        return model

    def undo(self, model: nn.Module) -> nn.Module:
        return model

    def rest(self) -> None:
        """Put all parameters back into host memory."""
        self._ends = False
        for blocks in self._models:
            for block in blocks:
                if block.fetched:
                    block.rest()

    def _before_forward(
        self,
        blocks: Sequence[StreamedBlock],
        index: int,
        module: nn.Module,
        inputs: object,
    ) -> None:
        assert self._lanes is not None, "the blocks have lanes"
        if blocks[index].in_backward:  # its activations are recomputed
            return
        self._lanes.follow_current_stream()
        with torch.no_grad():
            blocks[index].use_on_device()
            for next_block in blocks[index + 1 : index + 1 + _NUM_AHEAD]:
                next_block.fetch_block()

    def _after_forward(
        self,
        blocks: Sequence[StreamedBlock],
        index: int,
        module: nn.Module,
        inputs: object,
        block_output: Any,
    ) -> None:  # Any: the user's output
        block = blocks[index]
        if block.in_backward:
            return
        with torch.no_grad():
            block.rest()
        if torch.is_grad_enabled() and block_output is not None:
            for tensor in trees.tensors(block_output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._before_backward, blocks, index))  # type: ignore[no-untyped-call]  # untyped in torch
            if index == len(blocks) - 1:  # the backward begins with these
                with torch.no_grad():
                    for next_block in blocks[-_NUM_AHEAD:]:
                        next_block.fetch_block()

    def _before_backward(
        self, blocks: Sequence[StreamedBlock], index: int, grad: Tensor
    ) -> None:
        """Fetch a block whose backward begins, and the ones before it; those after it are done."""
        if not self._ends:
            self._ends = True
            Variable._execution_engine.queue_callback(self.rest)
        with torch.no_grad():
            for block_index, block in enumerate(blocks):
                if block.fetched and not index - _NUM_AHEAD <= block_index <= index + 1:
                    block.rest()
            blocks[index].in_backward = True
            blocks[index].use_on_device()
            for next_block in blocks[max(0, index - _NUM_AHEAD) : index][::-1]:
                next_block.fetch_block()


class PlaceRest:
    """Transform that moves a model to the device, except for the parameters that `StreamedWeights` keeps in host memory."""

    stage = Stage.PLACE

    def apply(
        self,
        model: nn.Module,
        request: PrepareRequest,
        ctx: ProcessContext,
        precision: Precision,
    ) -> nn.Module:
        if not request.train or not is_trainable(model):
            return model
        refuse_meta(model)
        streamed_parameters = []
        for _, _, block_parameters in find_streamable(model):
            streamed_parameters += block_parameters
        host_values = [p.data.cpu() for p in streamed_parameters]
        for parameter in streamed_parameters:
            parameter.data = torch.empty(0, dtype=parameter.dtype)
        model.to(ctx.device)
        for parameter, host_value in zip(streamed_parameters, host_values, strict=True):
            parameter.data = host_value
        return model

    def undo(self, model: nn.Module) -> nn.Module:
        return model


def find_streamable(
    model: nn.Module,
) -> list[tuple[str, nn.Module, list[nn.Parameter]]]:
    """Return the repeated blocks of a model with the parameters that no other module has.

    Raises: PrepareError if the model has no repeated block.
    """
    blocks = repeated_blocks(model)
    if not blocks:
        raise PrepareError(
            f"offload of parameters streams the repeated blocks of a model, and {type(model).__name__} has none (a ModuleList or Sequential with "
            "several modules of one class), so nothing would be offloaded. Use offload='optimizer', or strategy='fsdp', which shards "
            "any module."
        )
    block_names_by_parameter: dict[nn.Parameter, set[str]] = {}
    block_names = [name for name, _ in blocks]
    for parameter_path, parameter in model.named_parameters(remove_duplicate=False):
        block_name = next(
            (name for name in block_names if parameter_path.startswith(f"{name}.")), ""
        )
        block_names_by_parameter.setdefault(parameter, set()).add(block_name)
    streamable_blocks = []
    for name, block in blocks:
        block_parameters = []
        for parameter in block.parameters():
            is_plain = type(parameter) is nn.Parameter
            if is_plain and block_names_by_parameter[parameter] == {name}:
                block_parameters.append(parameter)
        streamable_blocks.append((name, block, block_parameters))
    return streamable_blocks


def is_streamed(parameter: Tensor) -> bool:
    """Return whether `StreamedWeights` keeps a parameter in host memory."""
    return hasattr(parameter, _HOST_PARAMETER_ATTRIBUTE)


class StreamedParameters:
    """Parameters that `StreamedWeights` keeps in host memory, as an update sees them."""

    def memory(self, parameter: Tensor) -> Tensor | None:
        """Return the host memory of a streamed parameter; None for others."""
        host_parameter: tuple[Tensor, object] | None = getattr(
            parameter, _HOST_PARAMETER_ATTRIBUTE, None
        )
        return None if host_parameter is None else host_parameter[0]

    def rest(self, parameters: Iterable[Tensor]) -> None:
        """Put streamed parameters back into host memory, with all others that are streamed with them."""
        owners = set()
        for parameter in parameters:
            host_parameter = getattr(parameter, _HOST_PARAMETER_ATTRIBUTE, None)
            if host_parameter is not None:
                owners.add(host_parameter[1])
        for owner in owners:
            streamed_weights = owner()
            if streamed_weights is not None:
                streamed_weights.rest()
