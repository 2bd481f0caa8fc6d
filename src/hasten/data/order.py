"""Global order of an epoch's units, equal on every rank: computed, drawn equally everywhere, or shared."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import closing
from dataclasses import replace
from itertools import cycle, islice
from typing import Any, Final, Literal, Protocol

import numpy as np
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from hasten.comm.base import Comm
from hasten.data.batch_plan import Indices, Shuffle, derive_seed
from hasten.data.carried_state import SamplerState
from hasten.data.foreign import find_length, is_exactly
from hasten.data.position import Part, Position, Witness
from hasten.data.random_states import OwnRng, RandomStates
from hasten.errors import ConfigError, DataError, PeerFailedError

# Any in this file: samplers and units are objects of the user.
_CHUNK: Final = 1024


class SampleOrder(Protocol):
    """Protocol of the order of a loader's units: dataset indices, or lists of them from a batch sampler."""

    def size(self) -> int | None:
        """Return the number of units of an epoch, if it is known before drawing them."""
        ...

    def begin(self, position: Position) -> Position:
        """Return `position` with the state needed to draw its epoch again; restores the state of an earlier call."""
        ...

    def seek(self, position: Position) -> Callable[[Indices], Indices] | None:
        """Return a function from positions to indices, if positions can be computed; else None."""
        ...

    def draw(self, position: Position) -> Iterator[Any]:
        """Yield the units of the epoch from its start."""
        ...


class ComputedOrder:
    """The order of the dataset, or a permutation that is a function of (seed, epoch); with random access."""

    def __init__(self, source: Sized, shuffled: bool) -> None:
        self._source = source
        self.shuffled = shuffled

    def size(self) -> int:
        return len(self._source)

    def begin(self, position: Position) -> Position:
        return position

    def seek(self, position: Position) -> Callable[[Indices], Indices]:
        if self.shuffled:
            return Shuffle(self.size(), position.seed, position.epoch).at
        return lambda positions: positions

    def draw(self, position: Position) -> Iterator[int]:
        index_at = self.seek(position)
        size = self.size()
        for first_position in range(0, size, 4096):
            yield from index_at(
                np.arange(first_position, min(first_position + 4096, size))
            ).tolist()


class DistributedOrder:
    """The user's DistributedSampler: it has already split the samples, so its order is for this rank only."""

    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        self.sampler = sampler

    def size(self) -> int:
        return len(self.sampler)

    def begin(self, position: Position) -> Position:
        return position

    def seek(self, position: Position) -> None:
        return None

    def draw(self, position: Position) -> Iterator[int]:
        self.sampler.set_epoch(position.epoch)
        return iter(self.sampler)

    def num_real(self) -> int:
        """Return the number of this rank's samples that are not DistributedSampler's padding."""
        sampler = self.sampler
        if sampler.drop_last:
            return len(sampler)
        num_samples = len(sampler.dataset)  # type: ignore[arg-type] # torch types datasets without __len__
        return max(-(-(num_samples - sampler.rank) // sampler.num_replicas), 0)


class SharedOrder:
    """Any other sampler or batch sampler: the first rank draws, the others receive.

    It is drawn under separate random states, seeded by (seed, epoch), so that it can be drawn again on resume and
    does not disturb those of training. The state that the sampler carries between epochs (a generator, a count, a list
    that it shuffles) is stored with the position: its `state_dict()` if it has one, else the attributes found. The
    position also holds a checksum of the order, so that a sampler whose state was not found is refused.
    """

    # Any: units are of any type
    def __init__(self, sampler: Iterable[Any], comm: Comm) -> None:
        self._sampler: Any = sampler
        self._comm = comm
        self._process = RandomStates()
        self._state = SamplerState(sampler)
        self._first_units: list[Any] = []

    def size(self) -> int | None:
        return find_length(self._sampler)

    def begin(self, position: Position) -> Position:
        if position.generator is None:
            return replace(position, generator=self._state.capture())
        self._state.restore(position.generator)
        return position

    def witness(self, consumed: int) -> Witness | None:
        """Return a checksum of the order's first units that were consumed; None if they are not plain numbers."""
        return _compute_witness(self._first_units[:consumed])

    def seek(self, position: Position) -> None:
        return None

    def draw(self, position: Position) -> Iterator[Any]:  # Any: units are of any type
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(position.epoch)
        seed = derive_seed(position.seed, position.epoch)
        with closing(OwnRng(seed, self._process)) as rng:
            chunks = self._draw_chunks(rng)
            self._first_units = next(chunks)
            self._check_witness(position, self._first_units)
            yield from self._first_units
            for chunk in chunks:
                yield from chunk

    def _draw_chunks(self, rng: OwnRng) -> Iterator[list[Any]]:
        """Yield the units in lists, of which the last one is shorter. Ranks: every rank."""
        units: Iterator[Any] | None = None
        is_full = True
        while is_full:
            chunk: list[Any] = []
            error: Exception | None = None
            if self._comm.rank == 0:
                try:
                    with self._process.kept(), rng.entered():
                        units = iter(self._sampler) if units is None else units
                        chunk = list(islice(units, _CHUNK))
                # errors of the user's sampler must reach the waiting ranks
                except Exception as raised:
                    error = raised
            chunk = self._share_chunk(chunk, error)
            is_full = len(chunk) == _CHUNK
            yield chunk

    def _check_witness(self, position: Position, chunk: list[Any]) -> None:
        """Raise DataError when the saved run's order started with other units."""
        if (
            position.witness is None
            or _compute_witness(chunk[: position.witness[0]]) == position.witness
        ):
            return
        raise DataError(
            f"{type(self._sampler).__name__} drew a different order for epoch {position.epoch} than in the saved run, so samples would be "
            "lost and repeated: it has state that hasten cannot find. Implement set_epoch(), or state_dict() and load_state_dict(), or "
            "draw from a generator that is an attribute of the sampler."
        )

    def _share_chunk(
        self, first_rank_chunk: list[Any], sampler_error: Exception | None
    ) -> list[Any]:
        if self._comm.size > 1:
            peer_error, first_rank_chunk = self._comm.broadcast_object(
                (
                    None if sampler_error is None else repr(sampler_error),
                    first_rank_chunk,
                )
            )
            if peer_error is not None and sampler_error is None:
                raise PeerFailedError(
                    f"the sampler raised {peer_error} on rank {self._comm.ranks[0]}, which draws for all ranks, so this rank has no indices. "
                    "See the traceback of that rank."
                )
        if sampler_error is not None:
            raise sampler_error
        return first_rank_chunk


def to_plain_unit(unit: Any) -> Any:
    """Return an index, or a batch of them, as numbers and texts. Raises: TypeError for other types."""
    if isinstance(unit, str):
        return str(unit)
    if isinstance(unit, list | tuple):
        return [to_plain_unit(index) for index in unit]
    return operator.index(unit)


def _compute_witness(units: list[Any]) -> Witness | None:  # Any: units are of any type
    try:
        units_text = repr([to_plain_unit(unit) for unit in units])
    except TypeError:
        return None
    if units:
        return (len(units), zlib.crc32(units_text.encode()))
    return None


Fit = Literal["longest", "shortest", "own"]
"""End of shards of different size: with the longest, padded by repeating first units; with the shortest; alone."""


class PartOrder:
    """The units of this rank's shard, and padding if the shard of another rank is longer.

    Ranks compare the sizes of their shards when the loader is prepared; those of samplers, which may change, at the
    start of every epoch.
    """

    def __init__(
        self, order: SampleOrder, comm: Comm, sizes: list[int | None], fit: Fit
    ) -> None:
        self.inner = order
        self._comm = comm
        self._sizes = sizes
        self._fit: Fit = fit if comm.size > 1 else "own"
        self._num_drawn: int | None = None
        """Number of units of the shard, once all of them are drawn."""

    def fitted(self, fit: Fit) -> PartOrder:
        """Return the same order with another end."""
        return PartOrder(self.inner, self._comm, self._sizes, fit)

    def size(self) -> int | None:
        if self._fit == "own":
            return self.inner.size()
        return self._common_size()

    def _common_size(self) -> int:
        """Return the number of units that every rank yields. Raises: DataError if a shard is empty or has no length."""
        known_sizes = [size for size in self._sizes if size is not None]
        if len(known_sizes) < len(self._sizes):
            raise DataError(
                "the sampler of data that is already sharded has no length, so the ranks cannot end an epoch together. Implement "
                "__len__, or set even_batches=False."
            )
        empty_ranks = [
            self._comm.ranks[member]
            for member in range(len(known_sizes))
            if not known_sizes[member]
        ]
        if self._fit == "longest" and 0 < len(empty_ranks) < len(known_sizes):
            raise DataError(
                f"the part of rank(s) {', '.join(map(str, empty_ranks))} of {len(known_sizes)} has no samples, so these ranks could not take part in a "
                "step. Give every rank a part with samples; with drop_last=True the epoch ends with the shortest part, with "
                "even_batches=False each rank ends separately."
            )
        if self._fit == "longest":
            return max(known_sizes)
        return min(known_sizes)

    def part(self, num_parts: int) -> Part:
        """Return the shard as recorded in positions; a sampler's length may change from epoch to epoch."""
        return (
            num_parts,
            None if isinstance(self.inner, SharedOrder) else self.inner.size(),
        )

    def num_real(self) -> int | None:
        """Return the number of units of the shard itself; None while it is unknown and no padding was yielded."""
        return self._num_drawn

    def begin(self, position: Position) -> Position:
        return self.inner.begin(position)

    def seek(self, position: Position) -> Callable[[Indices], Indices] | None:
        seek_inner = self.inner.seek(position)
        if seek_inner is None:
            return None
        size = self.inner.size() or 0
        prepared_size = self._sizes[self._comm.rank]
        if size != prepared_size and self._fit != "own":
            raise DataError(
                f"this rank's part of the data has {size} samples, and had {prepared_size} when it was prepared; other ranks rely on that "
                "number, so some would wait forever. Prepare a new loader, or keep the length."
            )
        self._num_drawn = size
        return lambda positions: seek_inner(positions % max(size, 1))

    def draw(self, position: Position) -> Iterator[Any]:
        self._num_drawn = None
        units = self.inner.draw(position)
        if self._fit == "own":
            yield from units
            return
        self._sizes = self._comm.all_gather_object(self.inner.size())
        yield from islice(self._repeat_units(units), self._common_size())
        if self._fit == "longest" and next(units, None) is not None:
            raise DataError(
                "a sampler of data that is already sharded yields more indices than its length, so samples would be lost. Correct "
                "__len__, or set even_batches=False."
            )

    def _repeat_units(self, units: Iterator[Any]) -> Iterator[Any]:
        """Yield the units, and then those at the start again and again."""
        first_units: list[Any] = []
        num_units = 0
        for num_units, unit in enumerate(units, 1):
            if num_units <= _CHUNK:
                first_units.append(unit)
            yield unit
        self._num_drawn = num_units
        yield from cycle(first_units)


def choose_fit(even: bool, drop_last: bool) -> Fit:
    """Return the fit of shards of different size."""
    if not even:
        return "own"
    if drop_last:
        return "shortest"
    return "longest"


def choose_order(
    sampler: Any,  # Any: a sampler is any iterable of indices
    *,
    seekable: bool,
    comm: Comm,
) -> SampleOrder:
    """Return the order for a user's sampler or batch sampler."""
    if isinstance(sampler, DistributedSampler):
        return DistributedOrder(sampler)
    if is_exactly(sampler, SequentialSampler):
        return ComputedOrder(sampler, shuffled=False)
    if (
        is_exactly(sampler, RandomSampler)
        and seekable
        and not sampler.replacement
        and sampler._num_samples is None
    ):
        return ComputedOrder(sampler, shuffled=True)
    return SharedOrder(sampler, comm)


def check_distributed(
    sampler: DistributedSampler[Any], num_shards: int, shard: int, dispatch: bool
) -> None:
    """Raise unless the user's DistributedSampler splits samples as the mesh does."""
    if dispatch:
        raise ConfigError(
            "dispatch_batches=True with a DistributedSampler: the reading rank would only see its part, and the rest would never be "
            "read. Remove the sampler: prepare() shards the loader."
        )
    if (sampler.num_replicas, sampler.rank) != (num_shards, shard):
        raise DataError(
            f"the loader's DistributedSampler has num_replicas={sampler.num_replicas} and rank={sampler.rank}, and this "
            f"process reads as {shard} of {num_shards} data-parallel ones; samples would be lost or read twice. Give "
            f"it num_replicas={num_shards}, rank={shard}, or remove it: prepare() shards the loader."
        )
