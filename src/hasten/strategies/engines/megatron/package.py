"""megatron-core itself: which versions, how its modules are imported, and its warnings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from hasten.optional import need

VERSIONS: Final = ">=0.16,<0.17"
"""The versions of megatron-core whose optimizers and schedules this adapter was tried with."""


@contextmanager
def quiet() -> Iterator[None]:
    """A block without the engine's warnings about packages that it could use as well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def hushed() -> Iterator[None]:
    """A block without warnings that megatron-core's own files give; those of the user's code pass."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        warnings.filterwarnings(
            "ignore", message=r".torch\.distributed\.\w+. is deprecated"
        )  # names that torch 2.13 renamed
        yield


@cache  # steps ask for modules too, and reading the installed versions takes longer than a step
def package(name: str = "") -> Any:  # Any: megatron-core is untyped here
    """megatron.core, or a module of it. Raises: MissingPackageError when it is absent or of another version."""
    with quiet():
        need("megatron", VERSIONS, "strategy='megatron'")
        return need(f"megatron.core.{name}" if name else "megatron.core")


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
    """Return the numbers of this process, once megatron-core has its groups."""
    state = package("parallel_state")
    return Ranks(
        tp=(state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
        cp=(state.get_context_parallel_rank(), state.get_context_parallel_world_size()),
        ep=(state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()),
        expert_tp=(state.get_expert_tensor_parallel_rank(), state.get_expert_tensor_parallel_world_size()),
        first=state.get_data_parallel_rank(with_context_parallel=True) == 0,
        first_of_experts=state.get_expert_data_parallel_rank() == 0,
    )
