"""A process group whose members are threads of one process, for unit tests of what ranks decide together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from hasten.comm.base import Comm

T = TypeVar("T")
DEADLOCK_S = 20.0


@dataclass
class _Meeting:
    """What the members exchange, one collective at a time."""

    barrier: threading.Barrier
    values: list[Any]
    """The value of each member, of any type."""


@dataclass
class ThreadComm:
    """One member. It offers the collectives that deciding code uses."""

    rank: int
    meeting: _Meeting
    ranks: tuple[int, ...]
    num_collectives: int = field(default=0)
    device = torch.device("cpu")

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_gather_object(self, python_object: Any) -> list[Any]:
        self.num_collectives += 1
        self.meeting.values[self.rank] = python_object
        self.meeting.barrier.wait(DEADLOCK_S)
        values = list(self.meeting.values)
        self.meeting.barrier.wait(DEADLOCK_S)
        return values

    def broadcast_object(self, python_object: Any, src: int = 0) -> Any:
        return self.all_gather_object(python_object)[src]

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack(self.all_gather_object(tensor.clone()))


def on_threads(
    work: Callable[[Comm], T], num_ranks: int, first_rank: int = 0
) -> list[T]:
    """Run the work of every rank in a thread of its own; return what each rank returns.

    Raises: the error of the first rank that has one, or BrokenBarrierError where ranks wait for each other in vain.
    """
    meeting = _Meeting(threading.Barrier(num_ranks), [None] * num_ranks)
    ranks = tuple(range(first_rank, first_rank + num_ranks))

    def guarded_work(rank: int) -> T:
        try:
            return work(cast(Comm, ThreadComm(rank, meeting, ranks)))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(guarded_work, rank) for rank in range(num_ranks)]
    errors = [error for future in futures if (error := future.exception())]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
