"""Agreement of ranks before a loader is split: equal settings, and equal data unless it is sharded already."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import count, islice, repeat
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from hasten.comm.base import Comm
from hasten.data.batch_plan import derive_seed
from hasten.data.carried_state import CarriedState, SamplerState
from hasten.data.foreign import (
    ForeignSplit,
    has_fixed_shard_order,
    length_of,
    plainly,
    split_by_itself,
)
from hasten.data.order import plain_unit
from hasten.data.random_states import RandomStates, seed_everything
from hasten.data.source import Forwarding, engine_of
from hasten.errors import DataError
from hasten.runtime.logs import get_logger

log = get_logger(__name__)

# Any in this file: datasets, samples and samplers of the user.
_LENGTH: Final = "the dataset's length"
_NUM_TURNS: Final = 3
_NUM_SAMPLES: Final = 4
_NUM_FIRST_UNITS: Final = 64
_MAX_UNITS: Final = 1_000_000
_MAX_LEAVES: Final = 200
_MAX_ITEMS: Final = 64
_NUM_VALUES: Final = 16

Leaf = list[Any]
"""A value of a sample: text with its type and checksum, and for real numbers some of them, which may differ by rounding."""
Sample = dict[str, Leaf]
"""The leaves of a sample by their paths."""


@dataclass(frozen=True, slots=True)
class LoaderAgreement:
    """Facts that hold on all ranks."""

    seed: int
    sharded: bool
    """True if every rank's loader holds that rank's shard of the data."""
    split: ForeignSplit | None = None
    """The split that the dataset performs itself, if one was recognised."""


def agree_on_loader(
    loader: DataLoader[Any],
    settings: Mapping[str, Any],
    already_sharded: bool | None,
    seed: int,
    comm: Comm,
    reads_samples: bool,
) -> LoaderAgreement:
    """Compare the ranks' settings, and without `already_sharded` their samplers and, with `reads_samples`, first samples.

    Ranks: every rank. Raises: DataError on every rank, with the values of each rank.
    """
    split = split_by_itself(loader.dataset) if already_sharded is None else None
    facts = {
        **settings,
        "already_sharded": already_sharded,
        "whether it splits itself": split is not None,
        _LENGTH: None
        if already_sharded or split is not None
        else length_of(loader.dataset),
    }
    facts_of_ranks: list[tuple[dict[str, Any], int]] = comm.all_gather_object(
        (facts, seed)
    )
    for name in facts:
        _refuse_difference(
            name, [rank_facts[name] for rank_facts, _ in facts_of_ranks], comm
        )
    seed = facts_of_ranks[0][1]
    if already_sharded:
        return LoaderAgreement(seed, True)
    if isinstance(loader.dataset, IterableDataset):
        _draw_alike(loader.dataset, comm)
    if split is not None:
        log.info(
            "the dataset is already split over the ranks by %s, so each rank reads its part",
            split.by,
        )
        return LoaderAgreement(seed, True, split)
    if already_sharded is None:
        _compare_samplers(loader, comm)
        if reads_samples:
            _compare_first_samples(loader, comm)
    return LoaderAgreement(seed, False)


def _refuse_difference(name: str, values: list[Any], comm: Comm) -> None:
    if all(value == values[0] for value in values):
        return
    table = ", ".join(
        f"rank {comm.ranks[member]}: {value}" for member, value in enumerate(values)
    )
    advice = (
        " If the dataset of each rank already is its part of the data, set DataLoaderConfiguration(already_sharded=True) or call "
        "prepare_data_loader(loader, already_sharded=True)."
        if name == _LENGTH
        else ""
    )
    raise DataError(
        f"the ranks prepare loaders that differ in {name} ({table}), so some would run out of batches while "
        f"the others wait for them. Give every rank the whole dataset and the same settings; prepare() splits it.{advice}"
    )


def _different_data(difference: str, num_ranks: int) -> DataError:
    return DataError(
        f"the ranks were given different data: {difference}. prepare() splits a loader, so each rank would read 1/{num_ranks} of its "
        "data and the rest would be lost. Give every rank the same dataset and sampler: call set_seed(0) before random data is made or "
        "split. If the loader of each rank holds its part of the data on purpose, set DataLoaderConfiguration(already_sharded=True), or "
        "call prepare_data_loader(loader, already_sharded=True). already_sharded=False leaves this check out."
    )


def _draw_alike(stream: Any, comm: Comm) -> None:
    """Set the stream's generators to their states on the first rank, since ranks that share it must draw equally."""
    carried = CarriedState(stream, attributes=False)
    generators = carried.capture()
    generators_of_ranks = comm.all_gather_object(generators)
    if has_fixed_shard_order(stream) and any(
        others != generators for others in generators_of_ranks
    ):
        raise DataError(
            f"the stream's {stream.num_shards} shards are shuffled without a seed, so every rank has them in another "
            f"order and samples would be lost or read twice. Give shuffle() a seed."
        )
    carried.restore(generators_of_ranks[0])


# -- indices that samplers draw ----------------------------------------------------------------------------------------
def _compare_samplers(loader: DataLoader[Any], comm: Comm) -> None:
    """Raise on every rank when the ranks' samplers yield different indices from equal random states.

    The order of the indices may differ, since all ranks use the first rank's. Samplers that yield other indices when
    they are drawn from again are not compared, nor are those of which nothing can be drawn twice.
    """
    batches = loader.batch_sampler
    sampler: Any = (
        batches
        if batches is not None and not plainly(batches, BatchSampler)
        else loader.sampler
    )
    kinds = (SequentialSampler, RandomSampler, DistributedSampler)
    if any(plainly(sampler, kind) for kind in kinds) or hasattr(sampler, "__next__"):
        return
    generators = comm.broadcast_object(
        CarriedState(sampler, attributes=False).capture()
    )
    first_units = comm.all_gather_object(
        _draw_units(sampler, generators, _NUM_FIRST_UNITS)
    )
    if None in first_units or all(units == first_units[0] for units in first_units):
        return
    checksum, repeated = (
        _checksum_of_units(_draw_units(sampler, generators, _MAX_UNITS))
        for _ in range(2)
    )
    checksums = comm.all_gather_object(checksum if checksum == repeated else None)
    if None not in checksums and len(set(checksums)) > 1:
        raise _different_data(
            f"{type(sampler).__name__} yields different indices on every rank",
            comm.size,
        )


def _draw_units(
    sampler: Any, generators: Mapping[str, Any] | None, num_units: int
) -> list[Any] | None:
    """Return the first units from these states of the sampler's generators; None if they cannot be drawn or compared."""
    state = SamplerState(sampler)
    saved_state = state.capture()
    try:
        with RandomStates().kept():
            seed_everything(0)
            CarriedState(sampler, attributes=False).restore(generators)
            return [plain_unit(unit) for unit in islice(iter(sampler), num_units)]
    # the user's sampler: the training loop raises its error when it draws
    except Exception:
        return None
    finally:
        state.restore(saved_state)


def _checksum_of_units(units: list[Any] | None) -> int | None:
    """Return a checksum of the set of indices."""
    if units is None:
        return None
    indices = {
        repr(index)
        for unit in units
        for index in (unit if isinstance(unit, list) else [unit])
    }
    return zlib.crc32(" ".join(sorted(indices)).encode())


# -- first samples -----------------------------------------------------------------------------------------------------
def _compare_first_samples(loader: DataLoader[Any], comm: Comm) -> None:
    """Raise on every rank when the ranks' first samples come from different data."""
    turns = _read_first_samples(loader, 1)
    checksum = (
        None
        if turns is None
        else zlib.crc32(repr([sorted(sample.items()) for sample in turns[0]]).encode())
    )
    checksums = comm.all_gather_object(checksum)
    if None in checksums or len(set(checksums)) == 1:
        return
    if samples_differ(comm.all_gather_object(_read_first_samples(loader, _NUM_TURNS))):
        raise _different_data(
            f"the first samples of {type(loader.dataset).__name__} differ between ranks",
            comm.size,
        )


def _read_first_samples(
    loader: DataLoader[Any], num_turns: int
) -> list[list[Sample]] | None:
    """Read the first samples, in a worker if the loader has any; None if they cannot be read."""
    dataset: Any = loader.dataset
    size = length_of(dataset) or 0
    is_stream = isinstance(dataset, IterableDataset)
    if not is_stream and not size:
        return None
    first: Any = (
        FirstElements(dataset, num_turns)
        if is_stream
        else FirstItems(dataset, size, num_turns)
    )
    engine = engine_of(
        loader,
        dataset=first,
        batch_size=None,
        batch_sampler=None,
        drop_last=False,
        sampler=count() if is_stream else range(len(first)),
        collate_fn=leaves_of_turn,
        num_workers=min(loader.num_workers, 1),
        persistent_workers=False,
        pin_memory=False,
    )
    engine.generator = torch.Generator().manual_seed(0)
    carried = CarriedState(dataset)
    saved_state = carried.capture()
    turns: list[list[Sample]] = [[] for _ in range(num_turns)]
    try:
        with RandomStates().kept():
            for turn, leaves in engine:
                turns[turn].append(leaves)
    # the user's dataset: the training loop raises its error when it reads
    except Exception as error:
        log.info("the first samples could not be compared between ranks: %r", error)
        return None
    finally:
        carried.restore(saved_state)
    return turns


class FirstItems(Forwarding):
    """Items from all parts of a map-style dataset, `num_turns` times: twice from equal random states, then from different ones."""

    def __init__(self, dataset: Any, size: int, num_turns: int) -> None:
        self.hasten_dataset = dataset
        num_items = min(size, _NUM_SAMPLES)
        self.hasten_indices = [
            number * (size - 1) // max(num_items - 1, 1) for number in range(num_items)
        ]
        self.hasten_num_turns = num_turns

    def __len__(self) -> int:
        return self.hasten_num_turns * len(self.hasten_indices)

    def __getitem__(self, index: int) -> Any:
        turn, number = divmod(index, len(self.hasten_indices))
        if not number:
            _seed_turn(turn)
        return turn, self.hasten_dataset[self.hasten_indices[number]]


class FirstElements(Forwarding, IterableDataset[Any]):
    """The first elements of a stream, `num_turns` times; none of a stream that can be read only once."""

    def __init__(self, dataset: Any, num_turns: int) -> None:
        self.hasten_dataset = dataset
        self.hasten_num_turns = num_turns

    def __iter__(self) -> Iterator[Any]:
        if iter(self.hasten_dataset) is iter(self.hasten_dataset):
            return
        for turn in range(self.hasten_num_turns):
            _seed_turn(turn)
            yield from (
                (turn, element)
                for element in islice(iter(self.hasten_dataset), _NUM_SAMPLES)
            )


def _seed_turn(turn: int) -> None:
    """Seed one reading, equally on every rank; the first two readings have equal seeds."""
    seed_everything(derive_seed(turn == 2))


def leaves_of_turn(turn_and_sample: tuple[int, Any]) -> tuple[int, Sample]:
    """Return (turn, leaves) for an element of FirstItems or FirstElements."""
    turn, sample = turn_and_sample
    return turn, leaves_of(sample)


def leaves_of(sample: Any) -> Sample:
    """Return the values of a sample by path; objects of unknown classes are left out."""
    leaves: Sample = {}
    waiting = [("", sample)]
    while waiting and len(leaves) < _MAX_LEAVES:
        path, value = waiting.pop(0)
        if isinstance(value, Mapping):
            waiting += [
                (f"{path}.{key}", item)
                for key, item in islice(value.items(), _MAX_ITEMS)
            ]
        elif isinstance(value, list | tuple):
            leaves[f"{path}.len"] = [str(len(value))]
            waiting += [
                (f"{path}.{number}", item)
                for number, item in enumerate(value[:_MAX_ITEMS])
            ]
        elif is_dataclass(value) and not isinstance(value, type):
            waiting += [
                (f"{path}.{field.name}", getattr(value, field.name))
                for field in fields(value)
            ]
        elif (leaf := _leaf(value)) is not None:
            leaves[path] = leaf
    return leaves


def _leaf(value: Any) -> Leaf | None:
    if value is None or isinstance(value, bool | int | str | bytes):
        return [f"{type(value).__name__} {zlib.crc32(repr(value).encode())}"]
    if isinstance(value, float):
        return ["float", value]
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        # torch cannot index these
        is_wide = value.dtype.kind == "u" and value.dtype.itemsize > 1
        value = torch.as_tensor(
            np.ascontiguousarray(value, dtype=np.int64 if is_wide else None)
        )
    if (
        not isinstance(value, Tensor)
        or value.layout != torch.strided
        or value.device.type == "meta"
    ):
        return None
    numbers = value.detach().reshape(-1).cpu()
    value_positions = (
        torch.linspace(
            0, max(numbers.numel() - 1, 0), min(_NUM_VALUES, numbers.numel())
        )
        .round()
        .long()
    )
    values = numbers[value_positions].tolist()
    # images are subject to rounding
    if value.is_floating_point() or value.dtype == torch.uint8:
        mean = float(numbers.double().mean()) if values else 0.0
        return [f"real {tuple(value.shape)}", mean, *values]
    return [f"exact {tuple(value.shape)} {zlib.crc32(repr(values).encode())}"]


def samples_differ(reads: Sequence[Sequence[list[Sample]] | None]) -> bool:
    """Return True if the first samples of ranks come from different data; each rank has read its samples three times.

    Values that one rank does not reproduce from equal random states are ignored. A value that is equal on all ranks,
    also under other random states, and differs between samples identifies the sample: then the rest is augmentation.
    """
    turns = [read for read in reads if read is not None]
    if len(turns) < len(reads):
        return False
    num_samples = min(len(samples) for turn in turns for samples in turn)
    if not num_samples:
        return False
    first, again, reseeded = (
        [turn[number][:num_samples] for turn in turns] for number in range(3)
    )
    paths = {path for samples in first for sample in samples for path in sample}
    steady = [path for path in paths if all(map(_is_equal, first, again, repeat(path)))]
    equal = [
        path
        for path in steady
        if all(_is_equal(samples, first[0], path) for samples in first[1:])
    ]
    fixed = [
        path for path in equal if all(map(_is_equal, first, reseeded, repeat(path)))
    ]
    is_identified = any(
        len({tuple(sample[path]) for sample in first[0]}) == num_samples
        for path in fixed
    )
    return len(equal) < len(steady) and not is_identified


def _is_equal(samples: list[Sample], others: list[Sample], path: str) -> bool:
    return all(
        path in sample
        and path in other_sample
        and _alike(sample[path], other_sample[path])
        for sample, other_sample in zip(samples, others, strict=True)
    )


def _alike(leaf: Leaf, other_leaf: Leaf) -> bool:
    if leaf[0] != other_leaf[0] or len(leaf) != len(other_leaf):
        return False
    return all(
        math.isclose(number, second, rel_tol=2e-2, abs_tol=1e-6)
        or (math.isnan(number) and math.isnan(second))
        for number, second in zip(leaf[1:], other_leaf[1:], strict=True)
    )
