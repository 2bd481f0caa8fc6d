"""RecordingComm: passes every call on to another Comm and counts calls and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hasten.comm.base import Comm, ReduceKind
from hasten.comm.session import Session


class RecordingComm:
    """A Comm that remembers how often and how much its members spoke."""

    def __init__(self, inner: Comm) -> None:
        self.inner = inner
        self.calls: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.inner.ranks

    @property
    def device(self) -> torch.device:
        return self.inner.device

    def all_reduce(self, x: Tensor, kind: ReduceKind = "sum") -> Tensor:
        self._count("all_reduce", x)
        return self.inner.all_reduce(x, kind)

    def all_gather(self, x: Tensor) -> Tensor:
        self._count("all_gather", x)
        return self.inner.all_gather(x)

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        self._count("broadcast", x)
        return self.inner.broadcast(x, src)

    def scatter(self, parts: Sequence[Tensor] | None, like: Tensor, src: int = 0) -> Tensor:
        self._count("scatter", like)
        return self.inner.scatter(parts, like, src)

    def all_gather_object(self, obj: Any) -> list[Any]:  # Any: the caller's objects
        self.calls["all_gather_object"] += 1
        return self.inner.all_gather_object(obj)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:  # Any: the caller's objects
        self.calls["broadcast_object"] += 1
        return self.inner.broadcast_object(obj, src)

    def session(self) -> Session:
        return self.inner.session()

    def barrier(self, label: str, timeout_s: float | None = None) -> None:
        self.calls["barrier"] += 1
        self.inner.barrier(label, timeout_s)

    def twin(self) -> Comm:
        return self.inner.twin()

    def _count(self, op: str, x: Tensor) -> None:
        self.calls[op] += 1
        self.num_bytes[op] += x.numel() * x.element_size()
