"""Differentiable collectives between the ranks that share a layer, at the start and the end of a split region."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hasten.modules.surgery import may_draw

# Any in this file: the context and the gradients of torch.autograd.Function, which torch leaves untyped.


class _Enter(torch.autograd.Function):
    """Identity whose gradient is summed over the group: every rank uses the whole input for its shard."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, process_group: dist.ProcessGroup) -> Tensor:
        ctx.group = process_group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _all_reduce(grad, ctx.group), None


class _Leave(torch.autograd.Function):
    """Sum over the group; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, process_group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(tensor, process_group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Gather(torch.autograd.Function):
    """All-gather along one dimension; the gradient is this rank's shard."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, dim: int, process_group: dist.ProcessGroup
    ) -> Tensor:
        ctx.dim = dim
        ctx.group = process_group
        return _all_gather(tensor, dim, process_group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _own_part(grad, ctx.dim, ctx.group), None, None


class _Split(torch.autograd.Function):
    """This rank's shard of one dimension; the gradient is all-gathered."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, dim: int, process_group: dist.ProcessGroup
    ) -> Tensor:
        ctx.dim = dim
        ctx.group = process_group
        return _own_part(tensor, dim, process_group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _all_gather(grad, ctx.dim, ctx.group), None, None


def enter_region(tensor: Tensor, process_group: dist.ProcessGroup) -> Tensor:
    """Return `x`, which is equal on all ranks, as the input of a split layer; its gradient is summed. Ranks: the group."""
    if process_group.size() == 1:
        return tensor
    return _apply_function(_Enter, tensor, process_group)


def leave_region(tensor: Tensor, process_group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the ranks' partial results, equal on every rank. Ranks: the group."""
    if process_group.size() == 1:
        return tensor
    return _apply_function(_Leave, tensor, process_group)


def gather_output(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return the ranks' shards of `dim` concatenated, for a computation that is equal on every rank. Ranks: the group."""
    if group.size() == 1:
        return tensor
    return _apply_function(_Gather, tensor, dim, group)


def split_input(tensor: Tensor, dim: int, process_group: dist.ProcessGroup) -> Tensor:
    """Return this rank's shard of `dim` of an input that is equal on every rank. Ranks: the group."""
    if process_group.size() == 1:
        return tensor
    return _apply_function(_Split, tensor, dim, process_group)


def _apply_function(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    output: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return output


def _all_reduce(tensor: Tensor, process_group: dist.ProcessGroup) -> Tensor:
    total = tensor.contiguous().clone()
    dist.all_reduce(total, group=process_group)
    return total


def _all_gather(tensor: Tensor, dim: int, process_group: dist.ProcessGroup) -> Tensor:
    local_shard = tensor.contiguous()
    parts_by_rank = [torch.empty_like(local_shard) for _ in range(process_group.size())]
    dist.all_gather(parts_by_rank, local_shard, group=process_group)
    return torch.cat(parts_by_rank, dim)


def _own_part(tensor: Tensor, dim: int, process_group: dist.ProcessGroup) -> Tensor:
    width = tensor.shape[dim] // process_group.size()
    return tensor.narrow(dim, process_group.rank() * width, width).contiguous()


class RankRandomStream:
    """Switch of the random state at the start of a split region to one that differs between ranks, and back at its end.

    Ranks of a tensor-parallel group must drop the same elements of replicated activations, and different elements of sharded
    activations. The rank's random state is derived from the common one, so recomputed activations and resumed runs draw
    the same numbers again.
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        self._needed = may_draw(model)
        self._rank = rank
        self._outside: tuple[Tensor, Tensor | None] | None = None
        self._device = torch.device("cpu")

    def begin_stream(self, module: nn.Module) -> None:
        """Switch to this rank's random state; does nothing inside a region that has already started."""
        if (
            not self._needed
            or not module.training
            or self._outside is not None
            or torch.compiler.is_compiling()
        ):
            return
        seed = int(torch.randint(2**62, ()))
        weight = next(module.parameters(), None)
        # a dropout has no parameters: keep the device
        self._device = self._device if weight is None else weight.device
        self._outside = torch.get_rng_state(), self._on_device()
        torch.manual_seed(seed + self._rank)

    def end_stream(self) -> None:
        """Switch back to the common random state."""
        if self._outside is None:
            return
        host, on_device = self._outside
        self._outside = None
        torch.set_rng_state(host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, self._device)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager that draws from the common random state inside a region."""
        if self._outside is None:
            yield
            return
        host_state = torch.get_rng_state()
        device_state = self._on_device()
        self.end_stream()
        try:
            yield
        finally:
            self._outside = torch.get_rng_state(), self._on_device()
            torch.set_rng_state(host_state)
            if device_state is not None:
                torch.cuda.set_rng_state(device_state, self._device)

    def _on_device(self) -> Tensor | None:
        if self._device.type == "cuda":
            return torch.cuda.get_rng_state(self._device)
        return None
