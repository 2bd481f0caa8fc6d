"""Process information and helpers: ranks, ordered blocks, printing once, decorators, shares of a list."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from hasten import trees
from hasten.accelerator.arguments import FUNCTION, check_number, check_type, refuse
from hasten.comm.agreement import Flag, vote
from hasten.errors import CommError, DataError
from hasten.runtime import bootstrap, env
from hasten.runtime.context import ProcessContext
from hasten.runtime.devices import choose_device
from hasten.runtime.topology import Topology

P = ParamSpec("P")
R = TypeVar("R")


class Process:
    """Information and helpers for this process; `Process()` without an Accelerator reads the environment and joins the world."""

    def __init__(self, ctx: ProcessContext | None = None, cpu: bool = False) -> None:
        self.ctx = ctx or start_process_context(cpu)
        self._trigger = Flag(self.ctx.world)
        self._ordering: str | None = None
        self.leads: Callable[[], bool] | None = None
        """Returns whether this process is the main one of several worlds that run together; None for one world."""

    @property
    def num_processes(self) -> int:
        """The number of processes in the world."""
        return self.ctx.topology.world_size

    @property
    def process_index(self) -> int:
        """The rank of this process in the world."""
        return self.ctx.topology.rank

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its node."""
        return self.ctx.topology.local_rank

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.ctx.device

    @property
    def is_main_process(self) -> bool:
        """True if this is rank 0 of the world."""
        return self.process_index == 0 and (self.leads is None or self.leads())

    @property
    def is_local_main_process(self) -> bool:
        """True if this is rank 0 of its node."""
        return self.local_process_index == 0 and (self.leads is None or self.leads())

    @property
    def is_last_process(self) -> bool:
        """True if this is the last rank of the world."""
        return self.process_index == self.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Block until every process has reached this call. Ranks: every rank."""
        self.ctx.world.barrier("wait_for_everyone")

    def print(self, *args: Any, **kwargs: Any) -> None:  # Any: arguments of print
        """Print once per node."""
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201  # printing is what the user asked for

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Context manager that runs its block on the main process, then on the others; errors are raised on all ranks."""
        with self._run_first(self.is_main_process, "main_process_first"):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Context manager that runs its block on each node's main process, then on the others; errors are raised on all ranks."""
        with self._run_first(self.is_local_main_process, "local_main_process_first"):
            yield

    @contextmanager
    def _run_first(self, first: bool, block_name: str) -> Iterator[None]:
        # inside a block of the same kind the order is already established
        if self._ordering == block_name:
            yield
            return
        if self._ordering is not None:
            raise CommError(
                f"{block_name} was entered inside {self._ordering}; the processes would wait for each other forever. "
                "Leave the outer block first, or use the same one for both."
            )
        # the first may prepare data for hours: no timeout, but an entry in the log
        if not first:
            self._meet_and_vote(None, f"{block_name}: the first")
        error: Exception | None = None
        self._ordering = block_name
        try:
            with self.ctx.collectives.extend_patience(block_name):
                yield
        # any error of the user's block has to reach the other ranks; it is re-raised
        except Exception as caught:
            error = caught
        finally:
            self._ordering = None
        if first:
            self._meet_and_vote(error, f"{block_name}: the first")
        self._meet_and_vote(error, f"{block_name}: the others")

    def _meet_and_vote(self, error: Exception | None, block_name: str) -> None:
        self.ctx.world.barrier(block_name, math.inf)
        vote(self.ctx.world, error, block_name)

    def on_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function to run on the main process only; it returns None elsewhere."""
        return self._run_only_where(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function to run on each node's main process only; it returns None elsewhere."""
        return self._run_only_where(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function to run on the last process only; it returns None elsewhere."""
        return self._run_only_where(lambda: self.is_last_process, function)

    def on_process(
        self, function: Callable[P, R] | None = None, process_index: int = 0
    ) -> Any:
        """Decorate a function to run on one process only; also usable as `@on_process(process_index=2)`."""
        if function is None:  # Any: a function, or a decorator when called without one
            return functools.partial(self.on_process, process_index=process_index)
        check_number(
            "on_process(process_index)", process_index, least=0, is_integer=True
        )
        return self._run_only_where(
            lambda: self.process_index == process_index, function
        )

    def on_local_process(
        self, function: Callable[P, R] | None = None, local_process_index: int = 0
    ) -> Any:
        """Decorate a function to run on one process of each node: `@on_local_process(local_process_index=1)`."""
        if function is None:  # Any: a function, or a decorator when called without one
            return functools.partial(
                self.on_local_process, local_process_index=local_process_index
            )
        check_number(
            "on_local_process(local_process_index)",
            local_process_index,
            least=0,
            is_integer=True,
        )
        return self._run_only_where(
            lambda: self.local_process_index == local_process_index, function
        )

    @staticmethod
    def _run_only_where(
        is_selected: Callable[[], bool], function: Callable[P, R]
    ) -> Callable[P, R | None]:
        check_type("on_process(function) and its kind", Callable, FUNCTION, function)

        @functools.wraps(function)
        def run_function(*args: P.args, **kwargs: P.kwargs) -> R | None:
            return function(*args, **kwargs) if is_selected() else None

        return run_function

    @contextmanager
    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> Iterator[Any]:
        """Context manager that yields this process's share of a list, tuple, dict of those, tensor or dataset.

        Shares differ by at most one element; with `apply_padding` the last element is repeated until all are equal.
        """
        # Any: the caller's container; the share is of the same kind.
        yield take_share(inputs, self.process_index, self.num_processes, apply_padding)

    def set_trigger(self) -> None:
        """Set a flag that `check_trigger` returns on every process. Ranks: any."""
        self._trigger.set()

    def check_trigger(self) -> bool:
        """Return whether any process has set the trigger; the call resets it. Ranks: every rank."""
        return self._trigger.check()


def start_process_context(cpu: bool = False) -> ProcessContext:
    """Return the context of this process, created from its environment variables."""
    variables = env.snapshot()
    topology = Topology.from_env(variables)
    device = choose_device(
        topology.local_rank, cpu, None if cpu else env.assigned_device(variables)
    )
    return bootstrap.start(topology, device)


def share_bounds(length: int, index: int, shares: int) -> tuple[int, int]:
    """Return the start and end of contiguous share `index` of `length` elements; the first shares may have one more."""
    share_length, num_longer = divmod(length, shares)
    start = index * share_length + min(index, num_longer)
    return start, start + share_length + (index < num_longer)


# Any: the caller's container
def take_share(
    inputs: Any, index: int, shares: int, apply_padding: bool = False
) -> Any:
    """Return share number `index` of `inputs`. Raises: DataError if the values of a dict differ in length."""
    if not hasattr(inputs, "__len__"):
        refuse(
            "split_between_processes(inputs)",
            inputs,
            "it needs a list, tuple, dict of those, tensor or dataset with a length",
        )
    if isinstance(inputs, Mapping):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(
                f"split_between_processes got a dict whose values differ in length: {lengths}; their rows would no "
                "longer belong together. Give values of equal length."
            )
        return trees.rebuild(
            inputs,
            [
                take_share(value, index, shares, apply_padding)
                for value in inputs.values()
            ],
        )
    if shares == 1:
        return inputs
    start, end = share_bounds(len(inputs), index, shares)
    if apply_padding and len(inputs):
        num_missing = -(-len(inputs) // shares) - (end - start)
    else:
        num_missing = 0
    if isinstance(inputs, Tensor):
        if num_missing:
            return torch.cat(
                [inputs[start:end], inputs[-1:].expand(num_missing, *inputs.shape[1:])]
            )
        return inputs[start:end]
    # a Hugging Face dataset
    if hasattr(inputs, "select") and hasattr(inputs, "column_names"):
        return inputs.select([*range(start, end), *([len(inputs) - 1] * num_missing)])
    if isinstance(inputs, Dataset):
        return Subset(inputs, [*range(start, end), *([len(inputs) - 1] * num_missing)])  # type: ignore[arg-type]
    own_share = inputs[start:end]
    return own_share + inputs[-1:] * num_missing if num_missing else own_share
