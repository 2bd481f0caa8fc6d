"""Shards of an engine's master weights, state and gradients: this rank's slice of each flattened parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hasten.checkpoint.base import Slice
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

    def slice_of(self, tensor: Tensor) -> Tensor:
        """Return this parameter's slice of a tensor that is laid out like `flat`."""
        return tensor if self.whole else tensor.narrow(0, self.start, self.size)

    def to_stored(self, tensor: Tensor) -> Tensor | Slice:
        """Return the slice in the form that checkpoints store."""
        data = self.slice_of(tensor.detach())
        if self.whole:
            return data
        return Slice(data, (self.total,), (self.offset,), owned=self.size > 0)

    def allocate_slice(self, dtype: torch.dtype) -> Tensor | Slice:
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
        for model_group, master_group in zip(
            optimizer.fp16_groups, optimizer.fp32_groups, strict=True
        ):
            for parameter, master_tensor in zip(model_group, master_group, strict=True):
                yield ZeroShard(
                    parameter,
                    master_tensor,
                    0,
                    0,
                    master_tensor.numel(),
                    master_tensor.numel(),
                    whole=True,
                )
    else:
        for parameter_group in optimizer.param_groups:
            for parameter in parameter_group["params"]:
                num_elements = parameter.numel()
                yield ZeroShard(
                    parameter,
                    parameter,
                    0,
                    0,
                    num_elements,
                    num_elements,
                    whole=True,
                    has_master=False,
                )


def _shards_of_flat_groups(optimizer: Any) -> Iterator[ZeroShard]:
    """Yield the shards of stages 1 and 2, where each rank updates a range of the concatenated parameters."""
    for group_index, group in enumerate(optimizer.bit16_groups):
        flat_tensor = optimizer.single_partition_of_fp32_groups[group_index]
        for parameter in group:
            mapping = parameter._hp_mapping
            num_elements = parameter.numel()
            is_half = parameter.dtype != flat_tensor.dtype
            if mapping is None:
                yield ZeroShard(
                    parameter, flat_tensor, 0, 0, 0, num_elements, has_master=is_half
                )
                continue
            flat_range = mapping.hp_fragment_address
            parameter_range = mapping.lp_fragment_address
            yield ZeroShard(
                parameter,
                flat_tensor,
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
            flat_tensor = optimizer.fp32_partitioned_groups_flat[group_index]
            offset, size = rank_range(parameter)
            is_half = parameter.ds_tensor.dtype != flat_tensor.dtype
            yield ZeroShard(
                parameter,
                flat_tensor,
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
        gradients = []
        for parameter in engine.module.parameters():
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        return gradients
    if stage == 3:
        if optimizer.offload_optimizer:
            return [
                flat_tensor.grad
                for flat_tensor in optimizer.fp32_partitioned_groups_flat
            ]
    elif optimizer.cpu_offload:
        return [
            flat_tensor.grad
            for flat_tensor in optimizer.single_partition_of_fp32_groups
        ]
    gradients = []
    for gradient_group in optimizer.averaged_gradients.values():
        for gradient in gradient_group or ():
            if gradient is not None:
                gradients.append(gradient)
    return gradients


class EngineNorm:
    """DeepSpeed's 2-norm of a window's gradients, computed once for the loop's clipping and for the engine's step.

    The step takes the value that clipping has computed, so that the update stays bit for bit that of plain DeepSpeed.
    """

    def __init__(self, optimizer: Any, stage: int) -> None:  # Any: DeepSpeed is untyped
        norm_method = "_get_norm_groups" if stage == 3 else "scaled_global_norm"
        self._compute: Callable[[], Any] = getattr(optimizer, norm_method)
        self._combine: Callable[[Any], Tensor] = need(
            "deepspeed.runtime.utils"
        ).combine_grad_norm_groups
        self._group_norms: Any = None
        setattr(optimizer, norm_method, self._take_group_norms)

    def _take_group_norms(self) -> Any:
        group_norms = self._group_norms
        self._group_norms = None
        return self._compute() if group_norms is None else group_norms

    def scaled_norm(self) -> Tensor:
        """Return the norm of the scaled gradients over all ranks; inf if one is not finite. Ranks: every rank."""
        if self._group_norms is None:
            self._group_norms = self._compute()
        if isinstance(self._group_norms, list):
            return self._combine(self._group_norms)
        return self._group_norms  # type: ignore[no-any-return]

    def forget_norm(self) -> None:
        """Discard the value, because the gradients change."""
        self._group_norms = None
