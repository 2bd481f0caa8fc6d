"""Detection of the rank that delays the others: each rank posts its step time, the main process compares them.

In synchronous training every rank's step takes equally long, because the fast ones wait inside the backward pass.
The time from requesting a batch to reaching the backward pass differs, so this time is measured and compared.
Times are posted in the process group's store. No rank waits for another, so a rank that leaves its loop early causes no hang.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.distributed import DistError, PrefixStore, Store

from hasten.optim.run_part import RunPart
from hasten.runtime.devices import kind_of


class BackwardTimer(RunPart):
    """Timer of this rank from requesting a batch to its backward pass.

    On the CPU every step is measured. On an accelerator the host runs ahead of the device, so one step per `every_s`
    is measured between two synchronisations and the rest cost nothing.
    """

    def __init__(
        self,
        device: torch.device,
        every_s: float = 10.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._asynchronous = device.type != "cpu" and not kind_of(device).lazy
        self._every_s = every_s
        self._clock = clock
        self._asked_s: float | None = None
        self._next_s = clock() + every_s
        self._sum_s = 0.0
        self._count = 0

    def start_timer(self) -> None:
        """Start the timer: the loop requests its next batch."""
        if self._asynchronous:
            if self._clock() < self._next_s:
                self._asked_s = None
                return
            self._next_s = self._clock() + self._every_s
            torch.accelerator.synchronize()
        self._asked_s = self._clock()

    def backward(self) -> None:
        """Stop the timer at the first backward pass of the step; later ones of the same step are ignored."""
        if self._asked_s is None:
            return
        if self._asynchronous:
            torch.accelerator.synchronize()
        self._sum_s += self._clock() - self._asked_s
        self._count += 1
        self._asked_s = None

    def take_mean(self) -> float | None:
        """Return the mean time since the last call, or None if nothing was measured."""
        mean_s = self._sum_s / self._count if self._count else None
        self._sum_s = 0.0
        self._count = 0
        return mean_s


@dataclass(frozen=True, slots=True)
class Straggler:
    """Rank that delays the others."""

    rank: int
    seconds: float
    usual_s: float

    def __str__(self) -> str:
        factor = self.seconds / max(self.usual_s, 1e-9)
        return (
            f"rank {self.rank} is slower than the others: {self.seconds * 1e3:.3g} ms to its backward pass, "
            f"{factor:.1f}x the usual {self.usual_s * 1e3:.3g} ms"
        )


def find_straggler(
    times_s: Mapping[int, float], factor: float = 1.3, at_least_s: float = 1e-3
) -> Straggler | None:
    """Return the slowest rank, if its time is `factor` times the median of the others and `at_least_s` longer."""
    if len(times_s) < 2:
        return None
    slowest_rank = max(times_s, key=lambda rank: times_s[rank])
    usual_s = statistics.median(
        slowest_s for rank, slowest_s in times_s.items() if rank != slowest_rank
    )
    slowest_s = times_s[slowest_rank]
    if slowest_s > factor * usual_s and slowest_s - usual_s > at_least_s:
        return Straggler(slowest_rank, slowest_s, usual_s)
    return None


class StragglerWatch:
    """Watch that periodically posts this rank's time, and on the main process reads those of all ranks."""

    def __init__(
        self, store: Store, rank: int, size: int, every_s: float = 10.0
    ) -> None:
        self._store = PrefixStore("hasten/pace", store)
        self._rank = rank
        self._size = size
        self._every_s = every_s
        # the first check is early
        self._next_s = time.perf_counter() + min(every_s, 2.0)
        self.found: Straggler | None = None
        self.named: set[int] = set()
        """Ranks that have been named in lines of text."""

    def compare_when_due(self, now_s: float, backward_timer: BackwardTimer) -> None:
        """Post and compare if it is due."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._every_s
        mean_s = backward_timer.take_mean()
        if mean_s is None:
            return
        try:
            self._store.set(str(self._rank), f"{mean_s:.6f}")
            times_s = self._read_all() if self._rank == 0 else {}
        # the store is gone: training will report it, and a hint may be missing
        except (DistError, RuntimeError):
            self._next_s = float("inf")
            return
        self.found = find_straggler(times_s)

    def _read_all(self) -> dict[int, float]:
        times_s: dict[int, float] = {}
        for rank in range(self._size):
            if self._store.check([str(rank)]):
                times_s[rank] = float(self._store.get(str(rank)))
        return times_s
