"""Batches kept ahead on the device: copied on a side stream while the device computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from hasten import trees
from hasten.data.plan import Padding
from hasten.data.source import Item

# Any in this file: batches are the user's own objects.
_WORTH_A_THREAD: Final = 1 << 20  # bytes of unpinned tensors that are staged in a thread rather than in line


class Copied(NamedTuple):
    """A batch whose copy to the device has been ordered."""

    batch: Any
    done: torch.Event | None
    """Reached by the side stream when the copy is complete; None when nothing was copied there."""


class Lane:
    """A side stream that carries batches to the device, safely: memory is not reused while either end needs it."""

    def __init__(self, device: torch.device, skip_keys: Collection[str] = ()) -> None:
        self._device = device
        self._skip_keys = frozenset(skip_keys)
        self._stream = torch.Stream(device=device)
        self._guarded = False
        self._thread: ThreadPoolExecutor | None = None

    def send(self, batch: Any) -> Copied | Future[Copied]:
        """Order the copy of a batch; large unpinned ones are staged in a thread, so that the caller does not wait."""
        if not self._guarded and _opaque(batch):
            self._guarded = True
        if self._guarded:  # in line: memory is taken here, before the user's next work can free any
            return self._copy(batch, self._reader_event())
        if _unpinned_bytes(batch) < _WORTH_A_THREAD:
            return self._copy(batch)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="hasten-staging")
        return self._thread.submit(self._copy, batch)

    def hand_over(self, sent: Copied | Future[Copied]) -> Any:
        """The batch, ready for use on the current stream of the calling thread."""
        copied = sent.result() if isinstance(sent, Future) else sent
        if copied.done is not None:
            current = torch.accelerator.current_stream(self._device)
            current.wait_event(copied.done)
            for leaf in trees.leaves(copied.batch):
                record = getattr(leaf, "record_stream", None)
                if record is not None and _on(leaf, self._device):
                    record(current)
        return copied.batch

    def close(self) -> None:
        """End the staging thread, after what it is doing."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None

    def _copy(self, batch: Any, before: torch.Event | None = None) -> Copied:
        pinned = _pin(batch, self._skip_keys)
        with self._stream:
            if before is not None:
                self._stream.wait_event(before)
            moved = trees.to_device(pinned, self._device, True, self._skip_keys)
            done = torch.Event(device=self._device)
            done.record(self._stream)
        return Copied(moved, done)

    def _reader_event(self) -> torch.Event:
        """What the device has been given to do so far.

        Objects that cannot `record_stream` are protected by order instead: their memory goes back to the side stream's
        pool, and no later copy starts before the work that was ordered up to its own sending is over.
        """
        event = torch.Event(device=self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return event


class Prefetch:
    """Keeps `depth` batches ahead of the one in the user's hands on the device."""

    def __init__(self, device: torch.device, depth: int, skip_keys: Collection[str] = ()) -> None:
        self._device = device
        self._depth = depth
        self._skip_keys = skip_keys

    def __call__(self, items: Iterator[Item]) -> Iterator[Item]:
        lane = Lane(self._device, self._skip_keys)
        queue: deque[tuple[Copied | Future[Copied], Padding | None, bool, Any]] = deque()
        try:
            for batch, real, last, mark in items:
                queue.append((lane.send(batch), real, last, mark))
                if len(queue) > self._depth:
                    yield _handed(lane, queue)
            while queue:
                yield _handed(lane, queue)
        finally:
            lane.close()


class LookAhead:
    """The same hold on batches for devices without streams: they are read ahead, and moved when handed over."""

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def __call__(self, items: Iterator[Item]) -> Iterator[Item]:
        queue: deque[Item] = deque()
        for item in items:
            queue.append(item)
            if len(queue) > self._depth:
                yield queue.popleft()
        yield from queue


def _handed(lane: Lane, queue: deque[tuple[Copied | Future[Copied], Padding | None, bool, Any]]) -> Item:
    sent, real, last, mark = queue.popleft()
    return lane.hand_over(sent), real, last, mark


def _pin(batch: Any, skip_keys: Collection[str]) -> Any:
    """The batch with its host tensors in pinned memory, from which copies run beside the host."""
    if isinstance(batch, Tensor):
        return batch if batch.device.type != "cpu" or batch.is_pinned() or not batch.numel() else batch.pin_memory()
    if not trees.is_container(batch):
        pin = getattr(batch, "pin_memory", None)
        return pin() if callable(pin) else batch
    parts = [part if key in skip_keys else _pin(part, skip_keys) for key, part in trees.children(batch)]
    return trees.rebuild(batch, parts)


def _unpinned_bytes(batch: Any) -> int:
    return sum(
        x.numel() * x.element_size() for x in trees.tensors(batch) if x.device.type == "cpu" and not x.is_pinned()
    )


def _opaque(batch: Any) -> bool:
    """Whether the batch holds an object that can be moved but cannot say on which stream it is used."""
    return any(
        hasattr(leaf, "to") and not hasattr(leaf, "record_stream")
        for leaf in trees.leaves(batch)
        if not isinstance(leaf, Tensor)
    )


def _on(leaf: Any, device: torch.device) -> bool:
    return not isinstance(leaf, Tensor) or leaf.device.type == device.type
