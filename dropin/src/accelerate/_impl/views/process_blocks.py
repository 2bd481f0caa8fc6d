"""Blocks that some processes run first, and inputs dealt out between processes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from accelerate._impl import ambient
from hasten.comm.agreement import vote

# Any in this file: the user's functions, and inputs that are dealt out.


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


class ProcessMethods:
    """What Accelerator and both states offer: decorators and blocks for some of the processes."""

    def on_main_process(self, function: Any = None) -> Any:
        """The function, run on the main process only."""
        return ambient.process().on_main_process(function)

    def on_local_main_process(self, function: Any = None) -> Any:
        """The function, run on each node's main process only."""
        return ambient.process().on_local_main_process(function)

    def on_last_process(self, function: Any) -> Any:
        """The function, run on the last process only."""
        return ambient.process().on_last_process(function)

    def on_process(self, function: Any = None, process_index: Any = None) -> Any:
        """The function, run on one process only."""
        return _alone(function) or ambient.process().on_process(function, process_index or 0)

    def on_local_process(self, function: Any = None, local_process_index: Any = None) -> Any:
        """The function, run on one process of each node."""
        return _alone(function) or ambient.process().on_local_process(function, local_process_index or 0)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Run the block on the main process, then on the others."""
        return goes_first(ambient.process().is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Run the block on each node's main process, then on the others."""
        return goes_first(ambient.process().is_local_main_process)

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """This process's share of a list, tuple, dict of those, tensor or dataset."""
        if ambient.process().num_processes == 1:
            return nullcontext(inputs)
        return ambient.process().split_between_processes(inputs, apply_padding)


def _alone(function: Any) -> Any:
    """The function, where there is one process, which then is every process it may be meant for."""
    # quirk: ONE_PROCESS_IS_ALL
    return function if ambient.process().num_processes == 1 else None
