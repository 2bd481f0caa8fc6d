"""Where a prepared loader's batches come from: the Source seam, and the source that reads indexed data on every rank."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any, NoReturn, Protocol

from torch.utils.data import DataLoader

from hasten.data.position import Position, Unit
from hasten.data.sampler import Assignment, Feed, Lot
from hasten.data.workers import WorkerDataset, batch_seeds
from hasten.errors import DataError

Item = tuple[Any, int | None, bool, Any]
"""(batch, rows that are not padding or None for all, last of the epoch, mark of a stream's position)."""

_SHOWN_INDICES = 32


class Source(Protocol):
    """Gives the batches of one rank from a position on."""

    @property
    def unit(self) -> Unit: ...
    @property
    def engine(self) -> DataLoader[Any]: ...
    def size(self) -> int | None:
        """Units of an epoch's global order, when known."""
        ...

    def steps(self) -> int | None:
        """Batches of a whole epoch on this rank, when known."""
        ...

    def begin(self, at: Position) -> Position:
        """`at` with what is needed to enter its epoch again."""
        ...

    def open(self, at: Position) -> Iterator[Item]:
        """The batches from `at` to the end of its epoch."""
        ...

    def reached(self, start: Position, steps: int, mark: Any) -> Position:
        """The position after `steps` batches from `start`; `mark` came with the last of them."""
        ...

    def skipped(self, start: Position, num_batches: int) -> Position:
        """The position `num_batches` of this rank's batches after `start`."""
        ...

    def change(self, name: str, value: Any) -> None:
        """Change a setting of the DataLoader that reads, from its next iteration on."""
        ...

    def copied(self, even: bool | None = None) -> Source:
        """A source over the same data that can be iterated on its own, with another `even_batches` when given."""
        ...


class IndexedSource:
    """Map-style data, read on this rank through a DataLoader that is fed this rank's indices."""

    def __init__(self, loader: DataLoader[Any], assignment: Assignment, rank: int, lots_per_step: int = 1) -> None:
        self.assignment = assignment
        self.unit = assignment.unit
        self._loader = loader
        self._rank = rank
        self._lots_per_step = lots_per_step
        self._feed = Feed(batched=assignment.form != "items")
        replaced: dict[str, Any] = {"batch_sampler": self._feed}
        if assignment.form == "items":
            replaced = {"batch_sampler": None, "sampler": self._feed}
        if loader.num_workers:
            replaced["dataset"] = WorkerDataset(loader.dataset)
        self.engine = engine_of(loader, **replaced)

    def size(self) -> int | None:
        return self.assignment.size()

    def steps(self) -> int | None:
        return self.assignment.steps()

    def begin(self, at: Position) -> Position:
        return self.assignment.order.begin(at)

    def open(self, at: Position) -> Iterator[Item]:
        return self.read(self.assignment.lots(at), at)

    def read(self, lots: Iterator[Lot], at: Position) -> Iterator[Item]:
        """The batches of the given lots, which begin at `at`."""
        seeds = None
        if self._loader.num_workers:
            plan = self.assignment.plan
            first = at.consumed // (plan.global_batch * self.assignment.stride) * self._lots_per_step
            seeds = batch_seeds(at.seed, at.epoch, plan.shard, first)
        notes = self._feed.load(lots, seeds)
        return self._read(iter(self.engine), notes, at)

    def reached(self, start: Position, steps: int, mark: Any) -> Position:
        return moved(start, self.assignment.reached(start.consumed, steps))

    def skipped(self, start: Position, num_batches: int) -> Position:
        return self.reached(start, num_batches, None)

    def change(self, name: str, value: Any) -> None:
        setattr(self.engine, name, value)

    def copied(self, even: bool | None = None) -> IndexedSource:
        return IndexedSource(self._loader, self.assignment.evened(even), self._rank, self._lots_per_step)

    def _read(self, batches: Iterator[Any], notes: deque[Lot], at: Position) -> Iterator[Item]:
        take = notes.popleft
        number = 0
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except Exception as error:  # the user's dataset or a worker: any type, raised on as it is
                self._explain(error, notes, at, number)
            if not notes:
                raise DataError(
                    f"{type(self._loader).__name__} gave a batch that was not asked for (rank {self._rank}, batch "
                    f"{number}): it overrides how a DataLoader iterates, so samples cannot be dealt out to ranks. "
                    f"Prepare a plain DataLoader, and wrap the prepared one."
                )
            _, real, last = take()
            number += 1
            yield batch, real, last, None

    def _explain(self, error: Exception, notes: deque[Lot], at: Position, number: int) -> NoReturn:
        """Say on the error which rank, epoch, batch and indices it happened at, and raise it on."""
        where = f"rank {self._rank}, epoch {at.epoch}, batch {number} after position {at.consumed}"
        indices = notes[0][0] if notes else "unknown"
        if isinstance(indices, list) and len(indices) > _SHOWN_INDICES:
            indices = f"{indices[:_SHOWN_INDICES]} and {len(indices) - _SHOWN_INDICES} more"
        error.add_note(f"hasten: reading failed on {where}; dataset indices of that batch: {indices}.")
        raise error


def engine_of(loader: DataLoader[Any], **replaced: Any) -> DataLoader[Any]:
    """A copy of the user's loader, all settings kept but those in `replaced`, with no workers started yet."""
    if type(loader).__module__.startswith("torchdata."):  # it keeps a position of its own; ours counts what users saw
        engine: DataLoader[Any] = DataLoader.__new__(DataLoader)
        engine.__dict__.update(loader.__dict__)
    else:
        engine = copy.copy(loader)
    engine.__dict__.update(_iterator=None, **replaced)  # DataLoader refuses plain assignment once it is built
    return engine


def moved(position: Position, consumed: int) -> Position:
    """The same epoch at another place."""
    return Position(
        epoch=position.epoch,
        consumed=consumed,
        seed=position.seed,
        generator=position.generator,
        stream=position.stream,
    )
