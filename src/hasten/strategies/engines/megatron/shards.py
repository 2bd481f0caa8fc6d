"""Tensors that a Megatron engine's optimizer updates: the whole of a parameter, or this data-parallel rank's shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hasten.checkpoint.base import Slice
from hasten.strategies.engines.megatron.model import MegatronModel
from hasten.strategies.engines.megatron.package import package
from hasten.strategies.engines.megatron.weights import slice_of


@dataclass(frozen=True, slots=True)
class ShardPart:
    """A parameter and the tensor that the inner optimizer updates for it."""

    model: MegatronModel
    parameter: Tensor
    main: Tensor | None
    """The updated tensor; None if other data-parallel ranks update all of the parameter."""
    span: tuple[int, int] | None = None
    """Start and size of the shard in the flattened parameter; None if this rank updates all of it."""

    @property
    def has_master(self) -> bool:
        """True if the updated tensor is a float32 copy of 16-bit weights."""
        return self.parameter.dtype != torch.float32

    @property
    def weights(self) -> Tensor:
        """The model's weights that correspond to the updated tensor."""
        if self.span is None:
            return self.parameter.detach()
        return self.parameter.detach().view(-1).narrow(0, *self.span)

    def laid_out(self, value: Any) -> bool:  # Any: a value of an optimizer's state
        """Return whether a state value is a tensor with the shape of the updated tensor."""
        return (
            isinstance(value, Tensor)
            and self.main is not None
            and value.ndim > 0
            and tuple(value.shape) == tuple(self.main.shape)
        )

    def stored(self, value: Tensor) -> Slice:
        """Return a tensor with the layout of the updated one, as checkpoints store it."""
        if self.span is None:
            return slice_of(value, self.model.place_of(self.parameter), self.model.owns(self.parameter))
        lane, lanes = self._lane()
        start, size = self.span
        owned = size > 0 and (lanes > 1 or self.model.ranks.tp[0] == 0)
        return Slice(value.detach().view(1, -1), (lanes, self.parameter.numel()), (lane, start), owned=owned)

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | Slice:
        """Allocate memory for a stored tensor of the parameter: this rank's slice, or the whole of one with another layout."""
        if self.span is None:
            at = self.model.place_of(self.parameter)
            if shape == () or shape != at.shape:
                return torch.empty(shape, dtype=dtype)
            return slice_of(torch.zeros_like(self.parameter, dtype=dtype, requires_grad=False), at, True)
        lane, lanes = self._lane()
        if shape != (lanes, self.parameter.numel()):
            return torch.empty(shape, dtype=dtype)
        start, size = self.span
        return Slice(torch.zeros(1, size, dtype=dtype, device=self.parameter.device), shape, (lane, start))

    def inside(self, tensor: Tensor) -> Tensor:
        """Return the elements that checkpoints store, of a tensor with the layout of the updated one."""
        return self.stored(tensor).data

    def _lane(self) -> tuple[int, int]:
        """Return the index and the number of distinct tensor-parallel shards of the parameter."""
        return self.model.ranks.tp if self.model.split(self.parameter) else (0, 1)


def clip_with_experts(parts: Sequence[ShardPart], max_norm: float) -> Tensor:
    """Clip all gradients to `max_norm` unless it is 0, and return their norm before clipping. Ranks: every rank.

    Experts are on other ranks than the other parameters, so each kind is summed over its ranks.
    """
    state = package("parallel_state")
    mains = [(part, part.main) for part in parts if part.main is not None and part.main.grad is not None]
    total = torch.zeros((), device=mains[0][1].device)
    for experts, group in (
        (False, state.get_model_parallel_group()),
        (True, state.get_expert_tensor_model_pipeline_parallel_group()),
    ):
        own = torch.zeros_like(total)
        for part, main in mains:
            copied = getattr(part.parameter, "shared", False)  # the last stage's copy of tied embeddings
            if part.model.is_expert(part.parameter) is experts and part.model.counts(part.parameter) and not copied:
                assert main.grad is not None
                own += main.grad.float().square().sum()
        dist.all_reduce(own, group=group)
        total += own
    norm = total.sqrt()
    if max_norm > 0:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for _, main in mains:
            assert main.grad is not None
            main.grad.mul_(factor)
    return norm


def parts_of(model: MegatronModel, parameters: Sequence[Tensor], inner: Any, shared: bool) -> Iterator[ShardPart]:
    """Yield the tensor that `inner`, megatron-core's optimizer, updates for each parameter.

    With `shared`, data-parallel ranks each update a shard.
    """
    if not shared:
        for parameter in parameters:
            main = parameter if parameter.dtype == torch.float32 else getattr(parameter, "main_param")  # noqa: B009
            yield ShardPart(model, parameter, main)
        return
    mains: dict[int, Tensor] = {}
    for models, shards in (
        (inner.model_float16_groups, inner.shard_fp32_from_float16_groups),
        (inner.model_fp32_groups, inner.shard_fp32_groups),
    ):
        for group, theirs in zip(models, shards, strict=True):
            mains |= {id(parameter): shard for parameter, shard in zip(group, theirs, strict=True)}
    for parameter in parameters:
        main = mains.get(id(parameter))
        span = (0, 0)
        if main is not None:
            found = inner._get_model_param_range_map(parameter)["param"]
            span = found.start, found.size
        yield ShardPart(model, parameter, main, span)
