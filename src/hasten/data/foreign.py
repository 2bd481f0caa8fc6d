"""Recognisers of classes of other packages, by module and class name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sized
from typing import Any, Final, NamedTuple, TypeGuard, TypeVar

from torch import Tensor
from torch.utils.data import ChainDataset

T = TypeVar("T")

# Any in this file: objects of packages that hasten does not depend on.
_HUB_STREAM: Final = ("datasets.iterable_dataset", "IterableDataset")
_HUB_BUFFER: Final = ("datasets.iterable_dataset", "BufferShuffledExamplesIterable")
_MOSAIC_STREAM: Final = ("streaming.base.dataset", "StreamingDataset")
_LITDATA: Final = (
    ("litdata.streaming.dataset", "StreamingDataset"),
    ("litdata.streaming.combined", "CombinedStreamingDataset"),
    ("litdata.streaming.parallel", "ParallelStreamingDataset"),
)
_WEB_PIPELINE: Final = ("webdataset.pipeline", "DataPipeline")


def length_of(dataset: object) -> int | None:
    """Return the dataset's length; None if it has none or raises for it, as `ChainDataset` of streams does."""
    try:
        return len(dataset) if isinstance(dataset, Sized) else None
    except (TypeError, NotImplementedError):
        return None


def is_hub_stream(dataset: object) -> bool:
    """Return True if the dataset is an IterableDataset of Hugging Face `datasets`."""
    return _is_a(dataset, _HUB_STREAM)


class ForeignSplit(NamedTuple):
    """Split over ranks that a dataset of another package performs itself."""

    by: str
    rank: int | None = None
    """None where the package determines the rank and the number of processes itself."""
    num_ranks: int | None = None


def split_by_itself(dataset: Any) -> ForeignSplit | None:
    """Return the split that a dataset performs itself, as its package documents; None if none is known."""
    if isinstance(dataset, ChainDataset):
        splits = [split_by_itself(member) for member in dataset.datasets]
        return (
            splits[0]
            if splits and all(member == splits[0] for member in splits)
            else None
        )
    if is_hub_stream(dataset):
        node = getattr(dataset, "_distributed", None)  # set by split_dataset_by_node()
        return (
            None
            if node is None
            else ForeignSplit(
                "split_dataset_by_node() of datasets", node.rank, node.world_size
            )
        )
    if _is_a(dataset, _MOSAIC_STREAM):
        return ForeignSplit("StreamingDataset of mosaicml-streaming")
    if any(_is_a(dataset, kind) for kind in _LITDATA):
        return ForeignSplit(f"{type(dataset).__name__} of litdata")
    if _is_a(dataset, _WEB_PIPELINE) and any(map(_splits_shards, dataset.pipeline)):
        return ForeignSplit("the split_by_node or resampled stage of webdataset")
    return None


def _splits_shards(stage: Any) -> bool:
    """Return True if a stage of a webdataset pipeline gives each node separate shards."""
    function = getattr(stage, "func", stage)  # unwraps functools.partial
    kind = function if hasattr(function, "__name__") else type(function)
    ours = str(getattr(kind, "__module__", "")).split(".")[0] == "webdataset"
    return ours and kind.__name__ in (
        "split_by_node",
        "ResampledShards",
        "resampled_",
        "ResampledShardList",
    )


def has_plain_state(stream: Any) -> bool:
    """Return True if `state_dict()` takes no arguments; those of litdata and mosaicml-streaming require counts."""
    if not (hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")):
        return False
    try:
        inspect.signature(stream.state_dict).bind()
    except (TypeError, ValueError):
        return False
    return True


def shares_epochs(stream: Any) -> bool:
    """Return True for a stream of mosaicml-streaming: all readers of a machine must start its iterators together."""
    return _is_a(stream, _MOSAIC_STREAM)


def state_loses_samples(stream: Any, in_worker: bool = False) -> bool:
    """Return True if `state_dict()` of a stream omits samples, because it contains a shuffle buffer of `datasets`.

    The documentation of `datasets` says that such a state loses the content of the buffer. So does a dataset of the
    user that wraps such a stream and passes its state on. A buffer of size one loses nothing; but taken in a worker,
    which reads only some of the shards, its state cannot be loaded: `datasets` compares it with that of all shards.
    """
    return any(
        _is_a(inner_stream, _HUB_BUFFER) and (inner_stream.buffer_size > 1 or in_worker)
        for inner_stream in parts_of(stream)
    )


def has_fixed_shard_order(stream: Any) -> bool:
    """Return True if a stream's generators cannot be exchanged: `datasets` orders shards when `shuffle()` is called."""
    return is_hub_stream(stream) and stream.num_shards > 1


def begin_anew(stream: Any, epoch: int) -> None:
    """Make a stream of another package start the epoch from the beginning.

    A stream of `datasets` discards a state loaded earlier. That of mosaicml-streaming counts its epochs in memory that the
    processes of a machine share, one for each iterator, also of iterators that were abandoned.
    """
    if (
        is_hub_stream(stream)
        and getattr(stream, "_starting_state_dict", None) is not None
    ):
        stream._starting_state_dict = None
    elif shares_epochs(stream):
        # its iterator waits for all readers of the machine before it reads and increases it
        stream.next_epoch = epoch


def own_epoch(stream: Any) -> None:
    """Give a worker's copy of a stream of `datasets` a separate epoch counter.

    Workers share one counter, and `set_epoch()` reads it before it adds the difference: two workers at the same
    time add it twice, and then read an epoch in another order.
    """
    for inner_stream in parts_of(stream):
        counter = (
            vars(inner_stream).get("_epoch") if is_hub_stream(inner_stream) else None
        )
        if isinstance(counter, Tensor) and counter.is_shared():  # type: ignore[no-untyped-call]
            inner_stream._epoch = counter.clone()


def is_torchdata(value: object) -> bool:
    """Return True if the object's class is defined in torchdata."""
    return type(value).__module__.startswith("torchdata.")


def plainly(value: object, kind: type[T]) -> TypeGuard[T]:
    """Return True if `value` is exactly of that class, or torchdata's version of it, not of a user's subclass."""
    value_type = type(value)
    return value_type is kind or (
        value_type.__name__ == kind.__name__ and is_torchdata(value)
    )


def _is_a(value: object, name: tuple[str, str]) -> bool:
    return any((base.__module__, base.__name__) == name for base in type(value).__mro__)


def parts_of(stream: Any, depth: int = 12) -> Iterator[Any]:
    """Yield the objects a stream is built from, found by attribute; `datasets` adds about two per transformation."""
    waiting, seen_ids = [(stream, depth)], set()
    while waiting:
        component, left = waiting.pop()
        if id(component) in seen_ids:
            continue
        seen_ids.add(id(component))
        yield component
        if left:
            inner = vars(component).values() if hasattr(component, "__dict__") else ()
            inner = component if isinstance(component, list | tuple) else inner
            waiting += [
                (value, left - 1) for value in inner if _may_hold_streams(value)
            ]


def _may_hold_streams(value: object) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= 64
    return (
        hasattr(value, "__iter__")
        and hasattr(value, "__dict__")
        and not isinstance(value, type | str | bytes | dict)
    )
