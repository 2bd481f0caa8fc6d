"""Batches on their way to XLA devices: copied ahead by a thread, and the end of the step before each of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from hasten import trees
from hasten.data.source import Item
from hasten.optional import need
from hasten.strategies.engines.xla.devices import Devices

# Any in this file: batches are the user's own objects.


class Transfer:
    """Copies batches to the devices in the background, `depth` of them ahead of the one in use."""

    def __init__(self, devices: Devices, depth: int, skip_keys: Collection[str] = ()) -> None:
        self._devices = devices
        self._depth = depth
        self._skip_keys = frozenset(skip_keys)
        self._sync = need("torch_xla").sync

    def __call__(self, items: Iterator[Item]) -> Iterator[Item]:
        """The batches on the devices. What the loop recorded with one is run when it asks for the next."""
        queue: deque[tuple[Future[Any], tuple[Any, bool, Any]]] = deque()
        with ThreadPoolExecutor(1, thread_name_prefix="hasten-xla") as pool:
            for batch, *rest in items:
                queue.append((pool.submit(self._put, batch), (rest[0], rest[1], rest[2])))
                if len(queue) > self._depth:
                    yield self._next(queue)
            while queue:
                yield self._next(queue)
        self._sync()

    def _next(self, queue: deque[tuple[Future[Any], tuple[Any, bool, Any]]]) -> Item:
        self._sync()
        sent, rest = queue.popleft()
        return sent.result(), *rest

    def _put(self, batch: Any) -> Any:
        if isinstance(batch, Tensor):
            return self._devices.send(batch) if batch.device.type == "cpu" else batch
        if not trees.is_container(batch):
            return trees.to_device(batch, self._devices.device)
        parts = [part if key in self._skip_keys else self._put(part) for key, part in trees.children(batch)]
        return trees.rebuild(batch, parts)
