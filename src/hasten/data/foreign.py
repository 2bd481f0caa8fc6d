"""Recognisers of other packages' classes: every test by module or class name of this room, checked against the package."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, Final, TypeGuard, TypeVar

from torch import Tensor

T = TypeVar("T")

# Any in this file: objects of packages that hasten does not depend on.
_HUB_STREAM: Final = ("datasets.iterable_dataset", "IterableDataset")
_HUB_BUFFER: Final = ("datasets.iterable_dataset", "BufferShuffledExamplesIterable")


def length_of(dataset: object) -> int | None:
    """The dataset's length; None where it has none, or defines one that it does not know, as `ChainDataset` of streams."""
    try:
        return len(dataset) if isinstance(dataset, Sized) else None
    except (TypeError, NotImplementedError):
        return None


def is_hub_stream(dataset: object) -> bool:
    """Whether the dataset is an IterableDataset of Hugging Face `datasets`."""
    return _is_a(dataset, _HUB_STREAM)


def state_loses_samples(stream: Any, in_worker: bool = False) -> bool:
    """Whether `state_dict()` of a stream leaves samples out: it ends in a shuffle buffer of `datasets`.

    The documentation of `datasets` says that such a state forgets what the buffer held. A dataset of the user's that
    wraps such a stream and passes its state on forgets as much. A buffer of one forgets nothing; taken in a worker, which
    reads some of the shards only, its state cannot be loaded again: `datasets` compares it with the state of all shards.
    """
    return any(_is_a(part, _HUB_BUFFER) and (part.buffer_size > 1 or in_worker) for part in _parts(stream))


def has_fixed_shard_order(stream: Any) -> bool:
    """Whether a stream's generators cannot be exchanged: `datasets` orders shards when `shuffle()` is called."""
    return is_hub_stream(stream) and stream.num_shards > 1


def begin_anew(stream: Any) -> None:
    """Make a stream of `datasets` begin its epoch at the start, although a state was loaded into it earlier."""
    if is_hub_stream(stream) and getattr(stream, "_starting_state_dict", None) is not None:
        stream._starting_state_dict = None


def own_epoch(stream: Any) -> None:
    """Give the copy of a stream of `datasets` in a worker an epoch counter of its own.

    Workers share one counter, and `set_epoch()` reads it before it adds the difference: two workers that do so at the same
    time add it twice, and then read an epoch in another order.
    """
    for part in _parts(stream):
        counter = vars(part).get("_epoch") if is_hub_stream(part) else None
        if isinstance(counter, Tensor) and counter.is_shared():  # type: ignore[no-untyped-call]
            part._epoch = counter.clone()


def is_torchdata(value: object) -> bool:
    """Whether the object's class is one of torchdata's."""
    return type(value).__module__.startswith("torchdata.")


def plainly(value: object, kind: type[T]) -> TypeGuard[T]:
    """Whether `value` is of that very class, or torchdata's version of it, rather than of a user's subclass."""
    own = type(value)
    return own is kind or (own.__name__ == kind.__name__ and is_torchdata(value))


def _is_a(value: object, name: tuple[str, str]) -> bool:
    return any((base.__module__, base.__name__) == name for base in type(value).__mro__)


def _parts(stream: Any, depth: int = 12) -> Iterator[Any]:
    """The objects a stream is built from, by their attributes: chains of `datasets` are about two a transformation."""
    waiting, seen = [(stream, depth)], set()
    while waiting:
        part, left = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if left:
            inner = vars(part).values() if hasattr(part, "__dict__") else ()
            inner = part if isinstance(part, list | tuple) else inner
            waiting += [(value, left - 1) for value in inner if _may_hold_streams(value)]


def _may_hold_streams(value: object) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= 64
    return (
        hasattr(value, "__iter__") and hasattr(value, "__dict__") and not isinstance(value, type | str | bytes | dict)
    )
