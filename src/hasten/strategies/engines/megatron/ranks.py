"""Where this process stands among the ranks of a Megatron engine."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.strategies.engines.megatron.package import package


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank's number and the number of ranks, by what they divide."""

    tp: tuple[int, int]
    cp: tuple[int, int]
    ep: tuple[int, int]
    expert_tp: tuple[int, int]
    """Ranks that hold parts of the same experts."""
    first: bool
    """This rank is the first of those that hold the same weights."""
    first_of_experts: bool
    """The same for the weights of experts, which fewer ranks hold copies of."""


def own_ranks() -> Ranks:
    """The numbers of this process, once megatron-core has its groups."""
    state = package("parallel_state")
    return Ranks(
        tp=(state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
        cp=(state.get_context_parallel_rank(), state.get_context_parallel_world_size()),
        ep=(state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()),
        expert_tp=(state.get_expert_tensor_parallel_rank(), state.get_expert_tensor_parallel_world_size()),
        first=state.get_data_parallel_rank(with_context_parallel=True) == 0,
        first_of_experts=state.get_expert_data_parallel_rank() == 0,
    )
