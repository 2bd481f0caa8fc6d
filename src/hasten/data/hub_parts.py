"""Detection of `.shard()` and `split_dataset_by_node()` of Hugging Face `datasets`, which leave no mark."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, Final, NamedTuple

import numpy as np

from hasten.data.foreign import is_hub_items, is_hub_stream, parts_of

# Any in this file: objects of `datasets` and pyarrow.
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
