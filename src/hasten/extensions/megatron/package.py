"""Import of megatron-core: supported versions, its modules, its warnings, and this process's ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from hasten.optional import need

VERSIONS: Final = ">=0.16,<0.17"
"""Versions of megatron-core that this adapter was tested with."""


@contextmanager
def hide_warnings() -> Iterator[None]:
    """Context manager that hides the engine's warnings about optional packages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def hide_engine_warnings() -> Iterator[None]:
    """Context manager that hides warnings from megatron-core's modules, but not from the user's code."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        warnings.filterwarnings(
            "ignore", message=r".torch\.distributed\.\w+. is deprecated"
        )  # functions that torch 2.13 renamed
        yield


# steps call this too, and reading the installed versions takes longer than a step
@cache
def import_megatron(name: str = "") -> Any:  # Any: megatron-core is untyped here
    """Return megatron.core or one of its modules. Raises: MissingPackageError if it is absent or of another version."""
    with hide_warnings():
        need("megatron", VERSIONS, "strategy='megatron'")
        return need(f"megatron.core.{name}" if name else "megatron.core")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's ranks."""

    tp: tuple[int, int]
    """Rank and number of ranks that shard a tensor."""
    first: bool
    """This rank is the first of the ranks with the same weights."""


def own_ranks() -> Ranks:
    """Return the ranks of this process; megatron-core's groups must exist."""
    state = import_megatron("parallel_state")
    tp = (
        state.get_tensor_model_parallel_rank(),
        state.get_tensor_model_parallel_world_size(),
    )
    return Ranks(tp, first=state.get_data_parallel_rank() == 0)
