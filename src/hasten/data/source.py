"""Sources of a prepared loader's batches: the Source protocol, and the source for map-style data on every rank."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Final, Literal, NoReturn, Protocol

from torch import Tensor
from torch.utils.data import DataLoader

from hasten import trees
from hasten.data.batch_plan import Padding, derive_seed
from hasten.data.foreign import is_torchdata
from hasten.data.order import PartOrder, SharedOrder
from hasten.data.position import Position, Unit
from hasten.data.random_states import RandomStates, seed_everything
from hasten.data.sampler import Assignment, IndexBatch
from hasten.errors import DataError
from hasten.optim.loader_progress import LoaderCursor

Item = tuple[Any, Padding | None, bool, Any]
"""(batch, its padding or None for none, last of the epoch, state of the source, which `reached` makes a position of)."""

Ahead = Literal["never", "always", "when large"]
"""Read-ahead of batches; the move of large batches to the device enables it (see ReadAhead)."""


@dataclass(slots=True)
class ReadAhead:
    """Switch of an epoch that may be read ahead; `is_enabled` enables it from the next batch on."""

    is_enabled: bool = False


_SHOWN_INDICES: Final = 32
_END: Final = object()


class BatchSource(Protocol):
    """Protocol of a source: the batches of one rank from a position on."""

    @property
    def unit(self) -> Unit: ...
    @property
    def engine(self) -> DataLoader[Any]: ...
    def size(self) -> int | None:
        """Return the number of units of an epoch's global order, if known."""
        ...

    def steps(self) -> int | None:
        """Return the number of batches of a whole epoch on this rank, if known."""
        ...

    def begin(self, position: Position) -> Position:
        """Return `position` with the state needed to enter its epoch again."""
        ...

    def remember(self, position: Position) -> Position:
        """Return `position`, the start of an epoch, with the state that the user's sampler or stream carries over."""
        ...

    def open(self, position: Position) -> Iterator[Item]:
        """Yield the batches from `position` to the end of its epoch."""
        ...

    def reached(self, start: Position, steps: int, source_state: Any) -> Position:
        """Return the position after `steps` batches from `start`; `source_state` came with the last of them."""
        ...

    def skipped(self, start: Position, num_batches: int) -> Position:
        """Return the position `num_batches` of this rank's batches after `start`."""
        ...

    def change(self, name: str, value: Any) -> None:
        """Change a setting of the reading DataLoader, from its next iteration on."""
        ...

    def copied(self, even: bool | None = None) -> BatchSource:
        """Return an independently iterable source over the same data, with another `even_batches` when given."""
        ...


class OuterSource:
    """Base of sources that transform the batches of another source, to which they delegate the rest."""

    def __init__(self, inner: BatchSource) -> None:
        self._inner = inner

    @property
    def unit(self) -> Unit:
        return self._inner.unit

    @property
    def engine(self) -> DataLoader[Any]:
        return self._inner.engine

    def size(self) -> int | None:
        return self._inner.size()

    def begin(self, position: Position) -> Position:
        return self._inner.begin(position)

    def remember(self, position: Position) -> Position:
        return self._inner.remember(position)

    def change(self, name: str, value: Any) -> None:
        self._inner.change(name, value)


class _Feed:
    """Index source of the engine, which takes an iterator of indices when it starts a pass."""

    def __init__(self) -> None:
        self.indices: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.indices


SeededIndices = tuple[list[Any], int]
"""A batch of indices, and the seed for drawing its samples. A plain tuple: one is pickled for every batch."""


class IndexedSource:
    """Source of map-style data, read on this rank through a DataLoader that is fed this rank's indices."""

    def __init__(
        self,
        loader: DataLoader[Any],
        assignment: Assignment,
        rank: int,
        batches_per_step: int = 1,
        ahead: Ahead = "never",
        shard: int | None = None,
    ) -> None:
        self._ahead = ahead
        self._shard = shard
        self._process = RandomStates()
        self.assignment = assignment
        self.unit = assignment.unit
        self._loader = loader
        self._rank = rank
        self._batches_per_step = batches_per_step
        self._feed = _Feed()
        engine_settings: dict[str, Any] = {"batch_sampler": self._feed}
        if assignment.form == "items":
            engine_settings = {"batch_sampler": None, "sampler": self._feed}
        if loader.num_workers:
            engine_settings["dataset"] = WorkerDataset(loader.dataset)
        self.engine = copy_loader(loader, **engine_settings)

    def size(self) -> int | None:
        order = self.assignment.order
        size = None if isinstance(order, PartOrder) else order.size()
        if size is None:
            return None
        return size * self.assignment.stride

    def steps(self) -> int | None:
        return self.assignment.steps()

    def begin(self, position: Position) -> Position:
        return self.assignment.order.begin(position)

    def remember(self, position: Position) -> Position:
        if position.generator is None:
            return self.assignment.order.begin(position)
        return position

    def open(
        self, position: Position, index_batches: Iterator[IndexBatch] | None = None
    ) -> Generator[Item]:
        """Yield the batches from `position`, or those of the given batches of indices, which start there."""
        if index_batches is None:
            index_batches = self.assignment.index_batches(position)
        expected_batches: deque[IndexBatch] = deque()
        if not self._loader.num_workers and self._ahead == "never":
            self._feed.indices = self._hand_out(index_batches, expected_batches)
            return self._read(iter(self.engine), expected_batches, position)
        plan = self.assignment.plan
        first_number = (
            position.consumed
            // (plan.global_batch * self.assignment.stride)
            * self._batches_per_step
        )
        seed_of = partial(
            derive_batch_seed,
            position.seed,
            position.epoch,
            plan.shard if self._shard is None else self._shard,
        )
        if self._loader.num_workers:
            seeds = map(seed_of, count(first_number))
            self._feed.indices = self._hand_out(index_batches, expected_batches, seeds)
            return self._read(iter(self.engine), expected_batches, position)
        self._feed.indices = self._hand_out(index_batches, expected_batches)
        switch = ReadAhead(position.ahead) if self._ahead == "when large" else None
        batches = self._read_seeded(iter(self.engine), seed_of, first_number, switch)
        return self._read(batches, expected_batches, position, switch)

    def _hand_out(
        self,
        index_batches: Iterator[IndexBatch],
        expected_batches: deque[IndexBatch],
        seeds: Iterator[int] | None = None,
    ) -> Iterator[Any]:
        """Yield the indices of each batch, with a seed for workers, and record the batch as expected until it arrives."""
        is_whole_batch = self.assignment.form == "items"
        for index_batch in index_batches:
            expected_batches.append(index_batch)
            indices = index_batch[0]
            if seeds is None:
                yield indices
            else:
                yield [indices] if is_whole_batch else indices, next(seeds)

    def _read_seeded(
        self,
        batches: Iterator[Any],
        seed_of: Callable[[int], int],
        first: int,
        switch: ReadAhead | None,
    ) -> Iterator[Any]:
        """Yield batches read ahead in this process: each under a separate seed, as in a worker.

        Batches that are read on request draw from the training's states, as in a plain loop.
        """
        for batch_number in count(first):
            if switch is not None and not switch.is_enabled:
                batch = next(batches, _END)
            else:
                with self._process.kept():
                    seed_everything(seed_of(batch_number))
                    batch = next(batches, _END)
            if batch is _END:
                return
            yield batch

    def reached(self, start: Position, steps: int, source_state: Any) -> Position:
        order = self.assignment.order
        stride = self.assignment.stride
        shard_part = None
        first_unit = start.consumed // stride
        consumed = first_unit + steps * self.assignment.plan.global_batch
        if isinstance(order, PartOrder):
            shard_part = order.part(stride)
            order = order.inner
        elif (size := order.size()) is not None:
            consumed = min(consumed, max(size, first_unit))
        consumed *= stride
        witness = order.witness(consumed) if isinstance(order, SharedOrder) else None
        reads_ahead = start.ahead
        if isinstance(source_state, ReadAhead):
            reads_ahead = source_state.is_enabled
        return replace(
            start,
            consumed=consumed,
            witness=witness,
            ahead=reads_ahead,
            part=shard_part,
        )

    def skipped(self, start: Position, num_batches: int) -> Position:
        return self.reached(start, num_batches, None)

    def change(self, name: str, value: Any) -> None:
        setattr(self.engine, name, value)

    def copied(self, even: bool | None = None) -> IndexedSource:
        assignment = self.assignment.evened(even)
        return IndexedSource(
            self._loader,
            assignment,
            self._rank,
            self._batches_per_step,
            self._ahead,
            self._shard,
        )

    def _read(
        self,
        batches: Iterator[Any],
        expected_batches: deque[IndexBatch],
        position: Position,
        switch: ReadAhead | None = None,
    ) -> Generator[Item]:
        is_whole_batch = self.assignment.form == "items"
        take_expected = expected_batches.popleft
        num_read = 0
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            # of the user's dataset or a worker: any type, re-raised unchanged
            except Exception as error:
                self._raise_explained(error, expected_batches, position, num_read)
            if not expected_batches:
                raise DataError(
                    f"{type(self._loader).__name__} returned an unexpected batch (rank {self._rank}, batch "
                    f"{num_read}): it overrides how a DataLoader iterates, so samples cannot be split over ranks. "
                    f"Prepare a plain DataLoader, and wrap the prepared one."
                )
            indices, num_real, is_last = take_expected()
            num_read += 1
            padding = None
            if num_real is not None:
                padding = Padding(num_real, None if is_whole_batch else len(indices))
            yield batch, padding, is_last, switch

    def _raise_explained(
        self,
        error: Exception,
        expected_batches: deque[IndexBatch],
        position: Position,
        number: int,
    ) -> NoReturn:
        """Add rank, epoch, batch and indices to the error as a note, and re-raise it."""
        location = f"rank {self._rank}, epoch {position.epoch}, batch {number} after position {position.consumed}"
        indices = expected_batches[0][0] if expected_batches else "unknown"
        if isinstance(indices, list) and len(indices) > _SHOWN_INDICES:
            indices = (
                f"{indices[:_SHOWN_INDICES]} and {len(indices) - _SHOWN_INDICES} more"
            )
        error.add_note(
            f"hasten: reading failed on {location}; dataset indices of that batch: {indices}."
        )
        raise error


def copy_loader(loader: DataLoader[Any], **replaced: Any) -> DataLoader[Any]:
    """Return a copy of the user's loader with the settings in `replaced` changed and no workers started."""
    # it counts a position itself; ours counts batches returned to users
    if is_torchdata(loader):
        engine: DataLoader[Any] = DataLoader.__new__(DataLoader)
        engine.__dict__.update(loader.__dict__)
    else:
        engine = copy.copy(loader)
    # DataLoader refuses plain assignment after construction
    engine.__dict__.update(_iterator=None, **replaced)
    return engine


def clone_leaf(leaf: Any) -> Any:
    """Return a clone of a tensor, so that users may change it in place; other leaves are returned unchanged."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


class Forwarding:
    """Proxy of the user's dataset: attributes it does not define are read from and written to that dataset.

    So `get_worker_info().dataset` works in a worker_init_fn as the dataset itself would. Its attributes start with
    `hasten_`, to avoid name clashes.
    """

    hasten_dataset: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "hasten_")):
            raise AttributeError(name)
        return getattr(self.hasten_dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("hasten_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self.hasten_dataset, name, value)


class WorkerDataset(Forwarding):
    """The user's dataset in a worker. Each batch starts from random states that depend on its position in the epoch.

    So a resumed run augments its batches as the uninterrupted one would have, regardless of earlier work.
    """

    def __init__(self, dataset: Any) -> None:
        self.hasten_dataset = dataset

    def __len__(self) -> int:
        return len(self.hasten_dataset)

    def __getitems__(self, picked: SeededIndices) -> Any:
        indices, seed = picked
        seed_everything(seed)
        get_items = getattr(self.hasten_dataset, "__getitems__", None)
        if get_items:
            return get_items(indices)
        return [_read_sample(self.hasten_dataset, index) for index in indices]

    def __getitem__(self, picked: SeededIndices) -> Any:
        (index,), seed = picked
        seed_everything(seed)
        return _read_sample(self.hasten_dataset, index)


def _read_sample(dataset: Any, index: Any) -> Any:
    try:
        return dataset[index]
    except Exception as error:  # of the user's dataset: any type, re-raised unchanged
        error.add_note(f"hasten: raised by the dataset at index {index!r}.")
        raise


def derive_batch_seed(seed: int, epoch: int, shard: int, number: int) -> int:
    """Return the seed of batch `number` of an epoch on one rank."""
    return derive_seed(seed, epoch, shard, number, 2)


def count_last_samples(
    source: BatchSource,
    start: Position,
    num_batches: int,
    cursor: LoaderCursor,
    total: int | None,
    batch_size: int | None,
) -> int | None:
    """Return the number of samples of the epoch's last batch over all ranks, the last of `num_batches` after `start`.

    A full batch has `total` samples, `batch_size` of them on this rank. Where the length of the data is unknown, all ranks are taken to have as many as this one.
    """
    if total is None:
        return None
    size = source.size()
    if size is not None:
        return min(max(size - start.consumed - (num_batches - 1) * total, 0), total)
    num_real = cursor.num_real
    if cursor.num_real is None:
        num_real = trees.batch_size(cursor.current_batch)
    if num_real is None or not batch_size:
        return total
    return min(num_real * total // batch_size, total)


# Any: a batch of the user's
def move_on_request(
    put_on_device: Callable[[Any], Any],
) -> Callable[[Iterable[Item]], Iterator[Item]]:
    """Return a move that transfers one batch at a time, when it is requested."""

    def move(items: Iterable[Item]) -> Iterator[Item]:
        for batch, padding, is_last, source_state in items:
            yield put_on_device(batch), padding, is_last, source_state

    return move
