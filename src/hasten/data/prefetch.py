"""Transfer of batches to the device: small ones copied synchronously, large ones ahead of time on a side stream."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from hasten import trees
from hasten.data.batch_plan import Padding
from hasten.data.source import Item, ReadAhead

# Any in this file: batches are objects of the user.
T = TypeVar("T")
_IN_LINE_BYTES: Final = 1 << 16
"""Batches up to this size are copied synchronously. A copy of 64 KiB takes the device a few microseconds, and CUDA puts
that much pageable memory into its command buffer without waiting; a side stream costs the host more than it saves."""
_TIMED_COPIES: Final = 8
_MAX_COPY_S: Final = 0.5e-3
"""Synchronous copies that block the host longer than this wait for the device, and use the side stream instead."""
# bytes of unpinned tensors from which on staging runs in a thread
_THREAD_MIN_BYTES: Final = 1 << 20


class InLine:
    """Copier of batches on the current stream on request, as long as that does not block the host."""

    def __init__(
        self,
        device: torch.device,
        skip_keys: Collection[str] = (),
        limit: int = _IN_LINE_BYTES,
    ) -> None:
        self._device = device
        self.skip_keys = skip_keys
        # CUDA has read pageable memory when the call returns; for other devices this is unknown
        self._non_blocking = device.type == "cuda"
        self._limit = limit
        self._timed = 0
        self._fastest_s = float("inf")

    def takes(self, batch: Any) -> bool:
        """Return True if the batch is small, or holds an object whose memory a side stream would reuse too early."""
        return count_host_bytes(batch) <= self._limit

    def copy(self, batch: Any) -> Any:
        """Return the batch on the device."""
        if self._timed >= _TIMED_COPIES:
            return trees.to_device(
                batch, self._device, self._non_blocking, self.skip_keys
            )
        start_s = time.perf_counter()
        moved_batch = trees.to_device(
            batch, self._device, self._non_blocking, self.skip_keys
        )
        self._fastest_s = min(self._fastest_s, time.perf_counter() - start_s)
        self._timed += 1
        if self._timed == _TIMED_COPIES and self._fastest_s > _MAX_COPY_S:
            self._limit = -1
        return moved_batch


class Slot:
    """Pinned buffers and an event for one copy at a time; they are reused when that copy is complete."""

    def __init__(
        self, done: torch.Event, allocate: Callable[[int], Tensor] | None = None
    ) -> None:
        self.done = done
        """Event recorded on the side stream after the slot's latest copy."""
        self.used = False
        self._allocate = allocate or _allocate_pinned
        self._buffers: list[Tensor] = []
        self._views: list[Tensor] = []
        self._next = 0

    def take(self) -> None:
        """Wait until the latest copy out of these buffers is complete, so that they can be overwritten."""
        if self.used:
            self.done.synchronize()
        self._next = 0

    def staged(self, x: Tensor) -> Tensor:
        """Return `x` in pinned memory, from which it can be copied asynchronously."""
        if x.device.type != "cpu" or not x.numel() or x.is_pinned():
            return x
        if (
            type(x) is not Tensor
            or x.requires_grad
            or not x.is_contiguous()
            or x.is_conj()
            or x.is_neg()
        ):
            return x.pin_memory()
        buffer_index = self._next
        self._next += 1
        if buffer_index == len(self._buffers):
            self._buffers.append(self._allocate(x.nbytes))
            self._views.append(self._buffers[buffer_index])
        buffer_view = self._views[buffer_index]
        if buffer_view.shape != x.shape or buffer_view.dtype != x.dtype:
            if self._buffers[buffer_index].nbytes < x.nbytes:
                self._buffers[buffer_index] = self._allocate(x.nbytes)
            buffer_view = self._views[buffer_index] = (
                self._buffers[buffer_index][: x.nbytes].view(x.dtype).view(x.shape)
            )
        return buffer_view.copy_(x)


class CopyStream:
    """A side stream that copies batches to the device; memory is not reused while either side needs it."""

    def __init__(
        self, device: torch.device, depth: int, skip_keys: Collection[str] = ()
    ) -> None:
        self._device = device
        self._skip_keys = frozenset(skip_keys)
        self._stream = torch.Stream(device=device)
        self._thread: ThreadPoolExecutor | None = None
        # one more than can be in flight: the batch that used a slot before has been returned
        self._slots = [Slot(torch.Event(device=device)) for _ in range(depth + 1)]
        self._sent = 0

    def send(self, batch: Any) -> Sent:
        """Enqueue the copy of a batch; large unpinned ones are staged in a thread, so that the caller does not wait."""
        slot = self._slots[self._sent % len(self._slots)]
        self._sent += 1
        num_bytes = sum(
            x.nbytes
            for x in trees.tensors(batch)
            if x.device.type == "cpu" and not x.is_pinned()
        )
        if num_bytes < _THREAD_MIN_BYTES:
            return self._copy(batch, slot)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="hasten-staging")
        return self._thread.submit(self._copy, batch, slot)

    def hand_over(self, sent: Sent) -> Any:
        """Return the batch, ready for use on the current stream of the calling thread."""
        batch, slot = sent.result() if isinstance(sent, Future) else sent
        current_stream = torch.accelerator.current_stream(self._device)
        current_stream.wait_event(slot.done)
        device_type = self._device.type
        for leaf in trees.leaves(batch):
            record_stream = getattr(leaf, "record_stream", None)
            is_elsewhere = isinstance(leaf, Tensor) and leaf.device.type != device_type
            if record_stream is not None and not is_elsewhere:
                record_stream(current_stream)
        return batch

    def close(self) -> None:
        """Finish the current task of the staging thread and end it."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None

    def _copy(self, batch: Any, slot: Slot) -> tuple[Any, Slot]:
        slot.take()
        pinned_batch = _pin_batch(batch, self._skip_keys, slot)
        with self._stream:
            moved_batch = trees.to_device(
                pinned_batch, self._device, True, self._skip_keys
            )
            slot.done.record(self._stream)
        slot.used = True
        return moved_batch, slot


Sent = tuple[Any, Slot] | Future[tuple[Any, Slot]]
"""A batch whose copy has been enqueued, with the slot that holds its source; or a future of one."""


class Prefetch:
    """Move that puts batches on the device: small ones on request, large ones `depth` batches ahead."""

    def __init__(
        self, device: torch.device, depth: int, skip_keys: Collection[str] = ()
    ) -> None:
        self._device = device
        self._depth = depth
        self._skip_keys = skip_keys

    def __call__(self, items: Iterator[Item]) -> Iterator[Item]:
        in_line = InLine(self._device, self._skip_keys)
        for item in items:
            batch, padding, is_last, source_state = item
            if not in_line.takes(batch):
                if isinstance(source_state, ReadAhead):
                    source_state.is_enabled = True
                yield from self._prefetch(item, items, in_line)
                return
            yield in_line.copy(batch), padding, is_last, source_state

    def _prefetch(
        self, first: Item, items: Iterator[Item], in_line: InLine
    ) -> Iterator[Item]:
        """Yield the first large batch and those after it; small ones stay in order and are copied synchronously."""
        item_queue: deque[tuple[Padding | None, bool, Any]] = deque()
        with Queue(self._device, self._depth, in_line) as batches:
            for batch, padding, is_last, source_state in chain([first], items):
                batches.append(batch)
                item_queue.append((padding, is_last, source_state))
                if len(item_queue) > self._depth:
                    yield batches.popleft(), *item_queue.popleft()
            while item_queue:
                yield batches.popleft(), *item_queue.popleft()


class Queue:
    """Ordered batches: large ones are in flight to the device, small ones are copied when they are removed."""

    def __init__(self, device: torch.device, depth: int, in_line: InLine) -> None:
        self._device = device
        self._depth = depth
        self._in_line = in_line
        self._copy_stream: CopyStream | None = None
        self._batches: deque[tuple[Any, bool]] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def append(self, batch: Any) -> None:
        """Append a batch, and start its copy if it is large."""
        is_small = self._in_line.takes(batch)
        if not is_small and self._copy_stream is None:
            self._copy_stream = CopyStream(
                self._device, self._depth, self._in_line.skip_keys
            )
        self._batches.append(
            (
                batch
                if is_small or self._copy_stream is None
                else self._copy_stream.send(batch),
                is_small,
            )
        )

    def popleft(self) -> Any:
        """Return the first batch, on the device."""
        batch, is_small = self._batches.popleft()
        if is_small or self._copy_stream is None:
            return self._in_line.copy(batch)
        return self._copy_stream.hand_over(batch)

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *_: object) -> None:
        if self._copy_stream is not None:
            self._copy_stream.close()


def with_next(steps: Iterator[T]) -> Iterator[tuple[T, T | None]]:
    """Yield each step together with the one that follows it."""
    next_step = next(steps, None)
    while next_step is not None:
        step = next_step
        next_step = next(steps, None)
        yield step, next_step


class LookAhead:
    """Iterator that reads batches ahead and moves nothing, for the CPU."""

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def __call__(self, items: Iterator[Item]) -> Iterator[Item]:
        item_queue: deque[Item] = deque()
        for item in items:
            item_queue.append(item)
            if len(item_queue) > self._depth:
                yield item_queue.popleft()
        yield from item_queue


def count_host_bytes(batch: Any) -> float:
    """Return the number of bytes of a batch's tensors.

    An object that hides its tensors counts as infinitely many with `record_stream`, which lets a side stream copy it,
    and as infinitely few without.
    """
    batch_type = type(batch)
    if batch_type is Tensor:
        return int(batch.nbytes)
    if batch_type is dict:
        batch_leaves = batch.values()
    elif batch_type is tuple or batch_type is list:
        batch_leaves = batch
    elif isinstance(batch, Tensor):
        return batch.numel() * batch.element_size()
    elif trees.is_container(batch):
        batch_leaves = [batch_leaf for _, batch_leaf in trees.children(batch)]
    else:
        if not hasattr(batch, "to"):
            return 0
        if hasattr(batch, "record_stream"):
            return math.inf
        return -math.inf
    num_bytes: float = 0
    for batch_leaf in batch_leaves:
        num_bytes += (
            batch_leaf.nbytes
            if type(batch_leaf) is Tensor
            else count_host_bytes(batch_leaf)
        )
    return num_bytes


def _pin_batch(batch: Any, skip_keys: Collection[str], slot: Slot) -> Any:
    """Return the batch with its host tensors in pinned memory, from which copies run asynchronously."""
    if isinstance(batch, Tensor):
        return slot.staged(batch)
    if not trees.is_container(batch):
        pin_method = getattr(batch, "pin_memory", None)
        return pin_method() if callable(pin_method) else batch
    pinned_items = [
        item if key in skip_keys else _pin_batch(item, skip_keys, slot)
        for key, item in trees.children(batch)
    ]
    return trees.rebuild(batch, pinned_items)


def _allocate_pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
