"""Recognisers of classes of other packages, by module and class name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sized
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


def find_length(dataset: object) -> int | None:
    """Return the dataset's length; None if it has none or raises for it, as `ChainDataset` of streams does."""
    try:
        return len(dataset) if isinstance(dataset, Sized) else None
    except (TypeError, NotImplementedError):
        return None


def is_hub_stream(dataset: object) -> bool:
    """Return True if the dataset is an IterableDataset of Hugging Face `datasets`."""
    return _is_instance_of(dataset, _HUB_STREAM)


class ForeignSplit(NamedTuple):
    """Split over ranks that a dataset of another package performs itself."""

    by: str
    rank: int | None = None
    """None where the package determines the rank and the number of processes itself."""
    num_ranks: int | None = None


def find_own_split(dataset: Any) -> ForeignSplit | None:
    """Return the split that a dataset performs itself, as its package documents; None if none is known."""
    if isinstance(dataset, ChainDataset):
        member_splits = [find_own_split(member) for member in dataset.datasets]
        if member_splits and all(
            member == member_splits[0] for member in member_splits
        ):
            return member_splits[0]
        return None
    if is_hub_stream(dataset):
        node_split = getattr(
            dataset, "_distributed", None
        )  # set by split_dataset_by_node()
        if node_split is None:
            return None
        return ForeignSplit(
            "split_dataset_by_node() of datasets",
            node_split.rank,
            node_split.world_size,
        )
    if _is_instance_of(dataset, _MOSAIC_STREAM):
        return ForeignSplit("StreamingDataset of mosaicml-streaming")
    if any(_is_instance_of(dataset, class_name) for class_name in _LITDATA):
        return ForeignSplit(f"{type(dataset).__name__} of litdata")
    if _is_instance_of(dataset, _WEB_PIPELINE) and any(
        map(_splits_shards, dataset.pipeline)
    ):
        return ForeignSplit("the split_by_node or resampled stage of webdataset")
    return None


def _splits_shards(stage: Any) -> bool:
    """Return True if a stage of a webdataset pipeline gives each node separate shards."""
    function = getattr(stage, "func", stage)  # unwraps functools.partial
    stage_class = function if hasattr(function, "__name__") else type(function)
    is_webdataset = (
        str(getattr(stage_class, "__module__", "")).split(".")[0] == "webdataset"
    )
    return is_webdataset and stage_class.__name__ in (
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
    return _is_instance_of(stream, _MOSAIC_STREAM)


def state_loses_samples(stream: Any, in_worker: bool = False) -> bool:
    """Return True if `state_dict()` of a stream omits samples, because it contains a shuffle buffer of `datasets`.

    The documentation of `datasets` says that such a state loses the content of the buffer. So does a dataset of the
    user that wraps such a stream and passes its state on. A buffer of size one loses nothing; but taken in a worker,
    which reads only some of the shards, its state cannot be loaded: `datasets` compares it with that of all shards.
    """
    return any(
        _is_instance_of(inner_stream, _HUB_BUFFER)
        and (inner_stream.buffer_size > 1 or in_worker)
        for inner_stream in list_components(stream)
    )


def has_fixed_shard_order(stream: Any) -> bool:
    """Return True if a stream's generators cannot be exchanged: `datasets` orders shards when `shuffle()` is called."""
    return is_hub_stream(stream) and stream.num_shards > 1


def restart_stream(stream: Any, epoch: int) -> None:
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


def detach_epoch_counter(stream: Any) -> None:
    """Give a worker's copy of a stream of `datasets` a separate epoch counter.

    Workers share one counter, and `set_epoch()` reads it before it adds the difference: two workers at the same
    time add it twice, and then read an epoch in another order.
    """
    for inner_stream in list_components(stream):
        epoch_counter = None
        if is_hub_stream(inner_stream):
            epoch_counter = vars(inner_stream).get("_epoch")
        if isinstance(epoch_counter, Tensor) and epoch_counter.is_shared():  # type: ignore[no-untyped-call]
            inner_stream._epoch = epoch_counter.clone()


def is_torchdata(value: object) -> bool:
    """Return True if the object's class is defined in torchdata."""
    return type(value).__module__.startswith("torchdata.")


def is_exactly(value: object, kind: type[T]) -> TypeGuard[T]:
    """Return True if `value` is exactly of that class, or torchdata's version of it, not of a user's subclass."""
    value_type = type(value)
    return value_type is kind or (
        value_type.__name__ == kind.__name__ and is_torchdata(value)
    )


def _is_instance_of(value: object, class_name: tuple[str, str]) -> bool:
    return any(
        (base.__module__, base.__name__) == class_name for base in type(value).__mro__
    )


def list_components(stream: Any, depth: int = 12) -> Iterator[Any]:
    """Yield the objects a stream is built from, found by attribute; `datasets` adds about two per transformation."""
    waiting_components = [(stream, depth)]
    seen_ids = set()
    while waiting_components:
        component, depth_left = waiting_components.pop()
        if id(component) in seen_ids:
            continue
        seen_ids.add(id(component))
        yield component
        if depth_left:
            inner_objects: Iterable[Any] = ()
            if isinstance(component, list | tuple):
                inner_objects = component
            elif hasattr(component, "__dict__"):
                inner_objects = vars(component).values()
            waiting_components += [
                (value, depth_left - 1)
                for value in inner_objects
                if _may_hold_streams(value)
            ]


def _may_hold_streams(value: object) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= 64
    return (
        hasattr(value, "__iter__")
        and hasattr(value, "__dict__")
        and not isinstance(value, type | str | bytes | dict)
    )
