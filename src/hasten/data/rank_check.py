"""Agreement of ranks before a loader is split: equal settings, and whether each has all the data or one shard."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import PurePath
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, WeightedRandomSampler

from hasten.comm.base import Comm
from hasten.data.batch_plan import derive_seed
from hasten.data.carried_state import CarriedState
from hasten.data.foreign import ForeignSplit, is_hub_items, is_hub_stream, length_of, parts_of, plainly, split_by_itself
from hasten.data.random_states import RandomStates, seed_everything
from hasten.data.rank_differences import (
    NUM_SAMPLES,
    Sample,
    asks_for_rank,
    decoded,
    description,
    different_data,
    leaves_of,
    samples_differ,
)
from hasten.data.source import Forwarding, engine_of
from hasten.errors import DataError
from hasten.runtime.logs import get_logger

log = get_logger(__name__)

# Any in this file: datasets, samples and samplers of the user, objects of `datasets` and pyarrow, and JSON values.
_LENGTH: Final = "the dataset's length"
_NUM_ROWS: Final = 16
_MOST_INDICES: Final = 50_000_000


class ItemsPart(NamedTuple):
    """Facts that show whether a `datasets.Dataset` is a shard of a larger one."""

    num_rows: int
    rows: int
    """Checksum of some stored rows."""
    offset: int
    """Offset of its first column in the memory of the table it was cut from."""
    table: int
    """Number of rows of the underlying table."""
    indices: int | None
    """Sum of hashed row numbers, if the dataset is a selection of the table's rows."""


Sources = tuple[int, ...]
"""Checksums of the files or tables that a stream reads."""


def part_of(dataset: Any) -> ItemsPart | Sources | None:
    """Return the identity of the data behind a dataset of `datasets`; None for other datasets and for empty ones."""
    if is_hub_stream(dataset):
        sources = [_source(source) for source in _sources(dataset)]
        known = [source for source in sources if source is not None]
        return tuple(sorted(known)) if known and len(known) == len(sources) else None
    if not is_hub_items(dataset) or not len(dataset) or not dataset.column_names:
        return None
    table, column = dataset.data, dataset.data.column(0)
    indices = getattr(dataset, "_indices", None)
    mixed = None
    if indices is not None and len(indices) <= _MOST_INDICES:
        mixed = _mixed(np.asarray(indices.column(0).to_numpy(), dtype=np.uint64))
    offset = column.chunk(0).offset if column.num_chunks else 0
    return ItemsPart(len(dataset), _rows(dataset), offset, len(table), mixed)


def are_parts(found: Sequence[ItemsPart | Sources | None]) -> bool:
    """Return True if the ranks' datasets are disjoint shards of one, proven by their sources, not their samples."""
    streams = [one for one in found if one is not None and not isinstance(one, ItemsPart)]
    if len(streams) == len(found):
        return len({source for one in streams for source in one}) == sum(map(len, streams))
    items = [one for one in found if isinstance(one, ItemsPart)]
    if len(items) < len(found) or len({one.rows for one in items}) < len(items):
        return False
    sizes = [one.num_rows for one in items]
    if all(one.indices is None for one in items):  # cut out of one table: shard() makes shards of equal size
        return max(sizes) - min(sizes) <= 1 and any(one.offset for one in items[1:])
    tables = {one.table for one in items}
    if any(one.indices is None for one in items) or len(tables) > 1 or sum(sizes) != min(tables) <= _MOST_INDICES:
        return False
    whole = _mixed(np.arange(min(tables), dtype=np.uint64))
    return sum(one.indices or 0 for one in items) % 2**64 == whole


def _rows(dataset: Any) -> int:
    places = sorted({round(number * (len(dataset) - 1) / (_NUM_ROWS - 1)) for number in range(_NUM_ROWS)})
    return zlib.crc32(repr(dataset.with_format("arrow")[places].to_pydict()).encode())


def _mixed(numbers: Any) -> int:
    """Return the sum of hashed numbers: equal for equal sets, in any order."""
    with np.errstate(over="ignore"):
        mixed = (numbers + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64))


def _sources(stream: Any) -> list[Any]:
    """Return the items of the lists that a stream's sources are given as: sharding a stream divides these lists."""
    found = []
    for part in parts_of(stream):
        kwargs = vars(part).get("kwargs") if hasattr(part, "__dict__") else None
        if isinstance(kwargs, dict):
            found += [item for value in kwargs.values() if isinstance(value, list) for item in value]
    return found


def _source(source: Any) -> int | None:
    """Return a checksum of a table, or of a file's name without its folder (which may differ per node); else None."""
    if is_hub_items(source):
        return zlib.crc32(repr((len(source), _rows(source) if len(source) else 0)).encode())
    if isinstance(source, str | PurePath):
        return zlib.crc32(str(source).rsplit("/", 1)[-1].encode())
    return None


@dataclass(frozen=True, slots=True)
class LoaderAgreement:
    """Facts that hold on all ranks."""

    seed: int
    sharded: bool
    """True if every rank's loader holds that rank's shard of the data."""
    split: ForeignSplit | None = None
    """The split that the dataset performs itself, if one was recognised."""
    checks: bool = False
    """True if ranks that read the same data compare it, because `already_sharded` was not given."""


def agree_on_loader(
    loader: DataLoader[Any], facts: Mapping[str, Any], given: bool | None, seed: int, comm: Comm, compares: bool
) -> LoaderAgreement:
    """Compare the ranks' loaders, and detect whether they are sharded already unless `given` says so.

    With `compares`, the first samples of datasets that look different are read and compared.

    Ranks: every rank. Raises: DataError on every rank, with the values of each rank.
    """
    length = length_of(loader.dataset)
    finding = _finding(loader) if given is None else {}
    gathered = comm.all_gather_object(({**facts, "already_sharded": given}, length, finding, seed))
    for name in (*facts, "already_sharded"):
        _refuse_difference(name, [others[0].get(name) for others in gathered], comm)
    seed = gathered[0][3]
    if given:
        return LoaderAgreement(seed, True)
    found = [others[2] for others in gathered]
    splits = [one.get("split") for one in found]
    if given is None and all(splits):
        split = ForeignSplit(*finding["split"])
        log.info("the dataset is already split over the ranks by %s, so each rank reads its part", split.by)
        return LoaderAgreement(seed, True, split)
    if given is None and are_parts([_part(one.get("part")) for one in found]):
        log.info(
            "the ranks have disjoint parts of a dataset of the package datasets, so each reads its part; already_sharded=False would "
            "split the parts again"
        )
        return LoaderAgreement(seed, True)
    _refuse_difference(_LENGTH, ["unknown" if others[1] is None else others[1] for others in gathered], comm)
    if given is None:
        _compare(loader, found, seed, comm, compares)
    return LoaderAgreement(seed, False, checks=given is None)


def _refuse_difference(name: str, values: list[Any], comm: Comm) -> None:
    if all(value == values[0] for value in values):
        return
    table = ", ".join(f"rank {comm.ranks[member]}: {value}" for member, value in enumerate(values))
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


# -- datasets that differ -----------------------------------------------------------------------------------------------
def _finding(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return plain values that describe a rank's dataset and sampler without reading a sample."""
    dataset = loader.dataset
    split, part = split_by_itself(dataset), part_of(dataset)
    return {
        "split": None if split is None else list(split),
        "part": None if part is None else {"items" if isinstance(part, ItemsPart) else "sources": list(part)},
        "description": description(dataset),
        "asks": asks_for_rank(dataset),
        "indices": _own_indices(loader.sampler),
    }


def _part(saved: Any) -> Any:
    if saved is None:
        return None
    return ItemsPart(*saved["items"]) if "items" in saved else tuple(saved["sources"])


def _own_indices(sampler: Any) -> list[int] | None:
    """Return (count, checksum) of the indices that one of torch's random samplers draws from, if it has any."""
    if plainly(sampler, SubsetRandomSampler):
        indices = torch.as_tensor(list(sampler.indices), dtype=torch.int64)
    elif plainly(sampler, WeightedRandomSampler):
        indices = torch.as_tensor(sampler.weights).nonzero().flatten()
    else:
        return None
    return [indices.numel(), derive_seed(*indices.sort().values[:4096].tolist())]


def _compare(loader: DataLoader[Any], found: list[dict[str, Any]], seed: int, comm: Comm, compares: bool) -> None:
    """Raise DataError on every rank when the loaders hold different data."""
    indices = [one["indices"] for one in found]
    if any(one != indices[0] for one in indices):
        raise different_data(f"{type(loader.sampler).__name__} has different indices on every rank", comm.size)
    alike = all(one[name] == found[0][name] for one in found for name in ("description", "part"))
    if not compares or (alike and not any(one["asks"] for one in found)):
        return
    reads = comm.all_gather_object(read_first_samples(loader, seed))
    if samples_differ([None if one is None else [decoded(samples) for samples in one] for one in reads]):
        raise different_data(f"the first samples of {type(loader.dataset).__name__} differ between ranks", comm.size)


# -- first samples -----------------------------------------------------------------------------------------------------
NUM_TURNS: Final = 3


def seed_of_turn(seed: int, turn: int) -> int:
    """Return the seed of one reading; the first two readings have equal seeds."""
    return derive_seed(seed, turn == 2)


class FirstItems(Forwarding):
    """The first items of a map-style dataset: twice from equal random states, then from different ones."""

    def __init__(self, dataset: Any, count: int, seed: int) -> None:
        self.hasten_dataset = dataset
        self.hasten_count = count
        self.hasten_seed = seed

    def __len__(self) -> int:
        return NUM_TURNS * self.hasten_count

    def __getitem__(self, place: int) -> Any:
        turn, index = divmod(place, self.hasten_count)
        if not index:
            seed_everything(seed_of_turn(self.hasten_seed, turn))
        return turn, self.hasten_dataset[index]


class FirstElements(Forwarding, IterableDataset[Any]):
    """The first elements of a stream: twice from equal random states, then from different ones."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.hasten_dataset = dataset
        self.hasten_seed = seed

    def __iter__(self) -> Iterator[Any]:
        for turn in range(NUM_TURNS):
            seed_everything(seed_of_turn(self.hasten_seed, turn))
            yield from ((turn, element) for element in islice(iter(self.hasten_dataset), NUM_SAMPLES))


def leaves_of_turn(read: Any) -> tuple[int, Sample]:
    """Return (turn, leaves) for an element of FirstItems or FirstElements."""
    turn, sample = read
    return turn, leaves_of(sample)


def read_first_samples(loader: DataLoader[Any], seed: int) -> list[list[Sample]] | None:
    """Read the first samples three times, in a worker if the loader has any; None if they cannot be read."""
    dataset: Any = loader.dataset
    size = length_of(dataset) or 0
    streams = isinstance(dataset, IterableDataset)
    if not streams and not size:
        return None
    first: Any = FirstElements(dataset, seed) if streams else FirstItems(dataset, min(size, NUM_SAMPLES), seed)
    engine = engine_of(
        loader,
        dataset=first,
        batch_size=None,
        batch_sampler=None,
        drop_last=False,
        sampler=count() if streams else range(len(first)),
        collate_fn=leaves_of_turn,
        num_workers=min(loader.num_workers, 1),
        persistent_workers=False,
        pin_memory=False,
    )
    engine.generator = torch.Generator().manual_seed(seed % 2**63)
    carried = CarriedState(dataset)
    before = carried.capture()
    turns: list[list[Sample]] = [[] for _ in range(NUM_TURNS)]
    try:
        with RandomStates().kept():
            for turn, leaves in engine:
                turns[turn].append(leaves)
    except Exception as error:  # the user's dataset: the training loop raises its error when it reads
        log.info("the first samples could not be compared between ranks: %r", error)
        return None
    finally:
        carried.restore(before)
    return turns
