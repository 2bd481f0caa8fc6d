"""Source of batches that torch itself reads, since a prepared loader must be a true DataLoader; and their move to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from hasten.data.loader import Loader
from hasten.data.position import Position, Unit
from hasten.data.prefetch import InLine, Queue, with_next
from hasten.data.skipping import skip_first_batches
from hasten.data.source import Item
from hasten.runtime.devices import kind_of

# Any in this file: batches and samplers are objects of the user.


def forward_epoch(target: object, epoch: int) -> None:
    """Call the `set_epoch` of a dataset or sampler, if it has one."""
    set_epoch = getattr(target, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


class TorchSource:
    """Source of batches that torch or torchdata reads through the prepared loader, whose sampler has the process's share.

    A position counts this process's batches, with the state of `generator`, which the order is drawn from. A process
    that does not read (`reads=False`) draws the same random numbers as reading would before the order.
    """

    unit: Unit = "batches"

    def __init__(
        self,
        loader: Loader,
        generator: torch.Generator | None,
        followers: tuple[Any, ...] = (),
        reads: bool = True,
    ) -> None:
        self.engine: DataLoader[Any] = loader
        self._loader = loader
        self._generator = generator
        self._followers = followers
        self._reads = reads
        self._begun: Iterator[Any] | None = None

    def size(self) -> int | None:
        return None

    def steps(self) -> int | None:
        try:
            return super(Loader, self._loader).__len__()
        except TypeError:
            return None

    def begin(self, position: Position) -> Position:
        for follower in self._followers:
            forward_epoch(follower, position.epoch)
        if self._generator is not None and position.generator is not None:
            self._generator.set_state(position.generator["order"])
        # same draw as the main process's iterator: the generators agree
        if not self._reads:
            torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
        return self.remember(position)

    def remember(self, position: Position) -> Position:
        if self._generator is None or position.generator is not None:
            return position
        return replace(position, generator={"order": self._generator.get_state()})

    def first(self, position: Position) -> Any:
        """Return the epoch's first batch; the next `open` continues after it."""
        self._begun = self._iterate_torch()
        return next(self._begun, None)

    def open(self, position: Position) -> Iterator[Item]:
        """Yield the batches from `at` on; earlier ones are not read if they are selected by index."""
        started_batches = self._begun
        self._begun = None
        if started_batches is not None:
            batches: Iterator[Any] = islice(
                started_batches, position.consumed - 1, None
            )
        elif position.consumed:
            plain = DataLoader.__new__(DataLoader)
            plain.__dict__.update(self._loader.__dict__, _iterator=None)
            batches = iter(skip_first_batches(plain, position.consumed))
        else:
            batches = self._iterate_torch()
        return ((batch, None, False, None) for batch in batches)

    def _iterate_torch(self) -> Iterator[Any]:
        return super(Loader, self._loader).__iter__()

    def reached(self, start: Position, steps: int, source_state: Any) -> Position:
        return replace(start, consumed=start.consumed + steps)

    def skipped(self, start: Position, num_batches: int) -> Position:
        return self.reached(start, num_batches, None)

    def change(self, name: str, value: Any) -> None:
        pass  # the changed loader is the one that reads

    def copied(self, even: bool | None = None) -> TorchSource:
        return self


class OneAhead:
    """Move of batches to the device, if there is one, that marks the last: one batch is read ahead, and copied if it is large."""

    def __init__(
        self, device: torch.device | str | int | None, put: Callable[[Any], Any]
    ) -> None:
        if device is None:
            self._device = None
        else:
            self._device = torch.device(device)
        self._put = put

    def __call__(self, items: Iterator[Item]) -> Iterator[Item]:
        device = self._device
        if device is None or not kind_of(device).side_streams:
            for (batch, real, _, state), following in with_next(items):
                yield (
                    batch if device is None else self._put(batch),
                    real,
                    following is None,
                    state,
                )
            return
        with Queue(device, 1, InLine(device)) as queue:
            for (batch, real, _, state), following in with_next(items):
                if not len(queue):
                    queue.append(batch)
                if following is not None:
                    queue.append(following[0])
                yield queue.popleft(), real, following is None, state
