"""hasten's Process with the established habits: blocks may be nested, and a lone process stands for every other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hasten.accelerator.process import Process, share

# Any in this file: the user's functions, and inputs that are dealt out.


class EstablishedProcess(Process):
    """This process among the others, as Accelerator and both states show it."""

    @contextmanager
    def _first(self, first: bool, label: str) -> Iterator[None]:
        """A block that some ranks run first; their errors are raised on all, and blocks may be nested. Ranks: every rank."""
        # quirk: NESTED_FIRST
        if not first:
            self._together(None, "process_first")
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # any error of the user's block has to reach the other ranks; it is re-raised
            if not first:
                raise
            error = caught
        if first:
            self._together(error, "process_first")

    def _only(self, here: Callable[[], bool], function: Callable[..., Any]) -> Callable[..., Any]:  # type: ignore[override]  # of this process
        # quirk: ONE_PROCESS_IS_ALL
        return function if self.num_processes == 1 else Process._only(here, function)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's share of a list, tuple, dict of those, tensor or dataset; a lone process has all of it as it is."""
        here, count = self.process_index, self.num_processes
        yield inputs if count == 1 or isinstance(inputs, str) else share(inputs, here, count, apply_padding)
