"""Whole tensors of a Megatron model, from the parts that tensor and expert parallel ranks hold."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hasten.strategies.context.ops import all_parts
from hasten.strategies.engines.megatron.layout import expert_of, renumbered
from hasten.strategies.engines.megatron.model import MegatronModel
from hasten.strategies.engines.megatron.package import package
from hasten.strategies.engines.megatron.weights import box_of, part_of


def whole_weights(model: MegatronModel, name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A parameter of this rank as a whole tensor, and those of other experts in its place. Ranks: every rank of a stage."""
    state = package("parallel_state")
    own = _joined(model, parameter)
    if not model.is_expert(parameter):
        yield name, own
        return
    number = expert_of(name)
    assert number is not None, f"{name} belongs to an expert"
    place = number - model.first_expert(model.ranks.ep[0])
    for rank, theirs in enumerate(all_parts(own, state.get_expert_model_parallel_group())):
        yield renumbered(name, model.first_expert(rank) + place), theirs


def _joined(model: MegatronModel, parameter: Tensor) -> Tensor:
    at = model.place_of(parameter)
    if not model.split(parameter):
        return part_of(parameter.detach(), at)
    state = package("parallel_state")
    group = (
        state.get_expert_tensor_parallel_group()
        if model.is_expert(parameter)
        else state.get_tensor_model_parallel_group()
    )
    whole = torch.empty(at.shape, dtype=parameter.dtype, device=parameter.device)
    for rank, theirs in enumerate(all_parts(parameter.detach(), group)):
        their = model.place_of(parameter, rank)
        box_of(whole, their).copy_(part_of(theirs, their))
    return whole
