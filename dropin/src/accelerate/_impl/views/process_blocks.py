"""Blocks that some processes run first, and inputs dealt out between processes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from accelerate._impl import ambient
from hasten.comm.agreement import vote

# Any in this file: the inputs that are dealt out.


@contextmanager
def goes_first(first: bool) -> Iterator[None]:
    """A block that some ranks run before the others; blocks may be nested. Ranks: every rank.

    Each rank meets the others once per block, so that the first rank's inner block meets the others' outer one. An error
    of the first rank is raised on all.
    """
    # quirk: NESTED_FIRST
    world = ambient.start().world
    if not first:
        world.barrier("process_first", math.inf)
        vote(world, None, "process_first")
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # any error of the user's block has to reach the other ranks; it is re-raised
        if not first:
            raise
        error = caught
    if first:
        world.barrier("process_first", math.inf)
        vote(world, error, "process_first")


def split_between_processes(inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
    """This process's share of a list, tuple, dict of those, tensor or dataset."""
    if ambient.process().num_processes == 1:
        return nullcontext(inputs)
    return ambient.process().split_between_processes(inputs, apply_padding)
