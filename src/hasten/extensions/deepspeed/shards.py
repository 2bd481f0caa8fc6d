"""Shards of an engine's master weights, state and gradients: this rank's slice of each flattened parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, Final

import torch
from torch import Tensor

from hasten.checkpoint.base import Slice
from hasten.comm.base import Comm
from hasten.errors import StepError
from hasten.optional import need

MASTER: Final = "master"
"""Key of the float32 weights in the optimizer's state."""


@dataclass(frozen=True, slots=True)
class ZeroShard:
    """One parameter's slice of a tensor that the inner optimizer updates."""

    parameter: Tensor
    flat: Tensor
    """Tensor that the inner optimizer updates; it may hold slices of several parameters."""
    start: int
    """Start of the slice in `flat`."""
    offset: int
    """Start of the slice in the flattened parameter."""
    size: int
    total: int
    """Number of elements of the parameter."""
    whole: bool = False
    """`flat` is the parameter's tensor, with its shape."""
    has_master: bool = True
    """`flat` is a float32 copy of weights that the model holds in half precision."""

    def part(self, tensor: Tensor) -> Tensor:
        """Return this parameter's slice of a tensor that is laid out like `flat`."""
        return tensor if self.whole else tensor.narrow(0, self.start, self.size)

    def stored(self, tensor: Tensor) -> Tensor | Slice:
        """Return the slice in the form that checkpoints store."""
        data = self.part(tensor.detach())
        return (
            data
            if self.whole
            else Slice(data, (self.total,), (self.offset,), owned=self.size > 0)
        )

    def cut(self, value: Any) -> Any:  # Any: arbitrarily nested state
        """Return this rank's slice of a whole tensor of the parameter; other values are returned unchanged."""
        if (
            self.whole
            or not isinstance(value, Tensor)
            or value.ndim == 0
            or value.numel() != self.total
        ):
            return value
        data = value.detach().reshape(-1).narrow(0, self.offset, self.size)
        return Slice(data, (self.total,), (self.offset,), owned=self.size > 0)

    def room(self, dtype: torch.dtype) -> Tensor | Slice:
        """Allocate memory for a slice."""
        if self.whole:
            return torch.empty_like(self.flat, dtype=dtype, requires_grad=False)
        return Slice(torch.empty(self.size, dtype=dtype), (self.total,), (self.offset,))


def shards_of(engine: Any, stage: int) -> Iterator[ZeroShard]:
    """Yield a shard for each trainable parameter."""
    optimizer = engine.optimizer
    if stage == 3:
        yield from _shards_of_partitioned_groups(optimizer)
    elif stage:
        yield from _shards_of_flat_groups(optimizer)
    elif hasattr(optimizer, "fp16_groups"):
        for models, masters in zip(
            optimizer.fp16_groups, optimizer.fp32_groups, strict=True
        ):
            for parameter, master in zip(models, masters, strict=True):
                yield ZeroShard(
                    parameter, master, 0, 0, master.numel(), master.numel(), whole=True
                )
    else:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                size = parameter.numel()
                yield ZeroShard(
                    parameter, parameter, 0, 0, size, size, whole=True, has_master=False
                )


def _shards_of_flat_groups(optimizer: Any) -> Iterator[ZeroShard]:
    """Yield the shards of stages 1 and 2, where each rank updates a range of the concatenated parameters."""
    for group_index, group in enumerate(optimizer.bit16_groups):
        flat = optimizer.single_partition_of_fp32_groups[group_index]
        for parameter in group:
            mapping, num_elements = parameter._hp_mapping, parameter.numel()
            is_half = parameter.dtype != flat.dtype
            if mapping is None:
                yield ZeroShard(
                    parameter, flat, 0, 0, 0, num_elements, has_master=is_half
                )
                continue
            flat_range, parameter_range = (
                mapping.hp_fragment_address,
                mapping.lp_fragment_address,
            )
            yield ZeroShard(
                parameter,
                flat,
                flat_range.start,
                parameter_range.start,
                parameter_range.numel,
                num_elements,
                has_master=is_half,
            )


def _shards_of_partitioned_groups(optimizer: Any) -> Iterator[ZeroShard]:
    """Yield the shards of stage 3, where each rank updates an equal, padded slice of every parameter."""
    for group in optimizer.fp16_groups:
        for parameter in group:
            group_index, start, _ = optimizer.grad_position[
                optimizer.get_param_id(parameter)
            ]
            flat = optimizer.fp32_partitioned_groups_flat[group_index]
            offset, size = rank_range(parameter)
            is_half = parameter.ds_tensor.dtype != flat.dtype
            yield ZeroShard(
                parameter,
                flat,
                start,
                offset,
                size,
                parameter.ds_numel,
                has_master=is_half,
            )


def rank_range(parameter: Any) -> tuple[int, int]:
    """Return the offset of this rank's slice of a ZeRO-3 parameter, and its size without padding."""
    rank_elements = parameter.partition_numel()
    offset = min(
        rank_elements * torch.distributed.get_rank(parameter.ds_process_group),
        parameter.ds_numel,
    )
    return offset, min(rank_elements, parameter.ds_numel - offset)


def weight_slice(parameter: Any) -> Slice:
    """Return this rank's slice of a ZeRO-3 parameter's weights, which checkpoints read and write."""
    offset, size = rank_range(parameter)
    rank_weights: Tensor = parameter.ds_tensor
    return Slice(
        rank_weights.detach().narrow(0, 0, size),
        (parameter.ds_numel,),
        (offset,),
        owned=size > 0,
    )


def rank_weights_of(parameter: Any) -> Tensor:
    """Return this rank's slice of a ZeRO-3 parameter's weights, without padding, for reading."""
    rank_weights: Tensor = parameter.ds_tensor
    return rank_weights.detach().narrow(0, 0, rank_range(parameter)[1])


def gradients_of(engine: Any, stage: int) -> list[Tensor]:
    """Return the gradients that this rank uses in the next step; at stage 0 they are the same on every rank."""
    optimizer = engine.optimizer
    if stage == 0:
        return [
            parameter.grad
            for parameter in engine.module.parameters()
            if parameter.grad is not None
        ]
    if stage == 3:
        if optimizer.swap_optimizer:  # they are moved to the drive at the step
            return [optimizer.grad_partitions_flat_buffer]
        if optimizer.offload_optimizer:
            return [flat.grad for flat in optimizer.fp32_partitioned_groups_flat]
    elif optimizer.cpu_offload:
        return [flat.grad for flat in optimizer.single_partition_of_fp32_groups]
    return [
        gradient
        for group in optimizer.averaged_gradients.values()
        for gradient in group or ()
        if gradient is not None
    ]


class EngineNorm:
    """DeepSpeed's 2-norm of a window's gradients, computed once for the loop's clipping and for the engine's step.

    The step takes the value that clipping has computed, so that the update stays bit for bit that of plain DeepSpeed.
    """

    def __init__(self, optimizer: Any, name: str) -> None:  # Any: DeepSpeed is untyped
        self._compute: Callable[[], Any] = getattr(optimizer, name)
        self._combine: Callable[[Any], Tensor] = need(
            "deepspeed.runtime.utils"
        ).combine_grad_norm_groups
        self._value: Any = None
        setattr(optimizer, name, self._take_value)

    @classmethod
    def of(cls, engine: Any, stage: int) -> EngineNorm | None:
        """Return the norm of an engine whose step computes it by a method; None for others, and where it is not that of the gradients."""
        optimizer = engine.optimizer
        norm_method = "_get_norm_groups" if stage == 3 else "scaled_global_norm"
        uses_other_norm = getattr(optimizer, "use_muon", False) or getattr(
            optimizer, "swap_optimizer", False
        )
        return (
            None
            if uses_other_norm or not stage or not hasattr(optimizer, norm_method)
            else cls(optimizer, norm_method)
        )

    def _take_value(self) -> Any:
        value, self._value = self._value, None
        return self._compute() if value is None else value

    def scaled(self) -> Tensor:
        """Return the norm of the scaled gradients over all ranks; inf if one is not finite. Ranks: every rank."""
        if self._value is None:
            self._value = self._compute()
        return (
            self._combine(self._value) if isinstance(self._value, list) else self._value
        )

    def forget(self) -> None:
        """Discard the value, because the gradients change."""
        self._value = None


_MODULUS: Final = (1 << 61) - 1
_FACTOR: Final = 1_000_003


class GradientOrder:
    """Comparison of the order in which the ranks' gradients became ready, after every backward.

    ZeRO 2 packs gradients into buckets as they become ready and adds the buckets of all ranks. If a rank's gradients become
    ready in another order, or one is missing, gradients of different parameters would be added.
    """

    def __init__(self, parameters: Mapping[str, Tensor], comm: Comm) -> None:
        self._names = list(parameters)
        self._comm = comm
        self._ready_order: list[int] = []
        for index, parameter in enumerate(parameters.values()):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    partial(self._add_ready, index)
                )  # type: ignore[no-untyped-call]

    def _add_ready(self, number: int, _: Tensor) -> None:
        self._ready_order.append(number)

    def begin(self) -> None:
        """Start recording a backward; the previous one may have failed."""
        self._ready_order = []

    def check(self) -> None:
        """Compare the order of the finished backward over ranks. Ranks: every rank.

        Raises: StepError on every rank, with the first parameter that differs.
        """
        ready_order, digest = self._ready_order, 0
        for index in ready_order:
            digest = (digest * _FACTOR + index + 1) % _MODULUS
        digest_bounds = self._comm.all_reduce(
            torch.tensor([digest, -digest]), "max"
        ).tolist()
        if digest_bounds[0] == -digest_bounds[1]:
            return
        orders: list[list[int]] = self._comm.all_gather_object(ready_order)
        other_rank = next(
            rank for rank, order in enumerate(orders) if order != orders[0]
        )
        position, first_index, other_index = next(
            (position, *indices)
            for position, indices in enumerate(
                zip_longest(orders[0], orders[other_rank], fillvalue=-1)
            )
            if indices[0] != indices[1]
        )
        raise StepError(
            f"ranks passed gradients to ZeRO 2 in different orders: gradient {position + 1} of the backward was {self._name(first_index)} on rank "
            f"{self._comm.ranks[0]} and {self._name(other_index)} on rank {self._comm.ranks[other_rank]}, so gradients of different parameters "
            "would be added. Use the same parameters in the same order on every rank, without a forward on only one rank, or use "
            "zero_stage 1 or 3."
        )

    def _name(self, number: int) -> str:
        return "none" if number < 0 else repr(self._names[number])
