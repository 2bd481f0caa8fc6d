"""The Comm protocol: collectives of a process group on single tensors and objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from hasten.comm.encoding import Codec

ReduceKind = Literal["sum", "mean", "min", "max"]


class Comm(Protocol):
    """A process group. Every member must call every method, in the same order.

    Positions (`rank`, `src`) are relative to the group; `ranks` holds the members' global ranks.
    Results are on the device of the argument; arguments are never changed.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def codec(self) -> Codec:
        """Encoding of objects as bytes."""
        ...

    def all_reduce(self, tensor: Tensor, kind: ReduceKind = "sum") -> Tensor:
        """Return the elementwise sum, mean, min or max over the members. Booleans sum to int64 counts; means are floats."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return every member's tensor, stacked as `(size, *x.shape)`. Shapes must be equal."""
        ...

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Return the tensor of member `src`. Shape and dtype must be equal everywhere."""
        ...

    def scatter(
        self, parts: Sequence[Tensor] | None, like: Tensor, src: int = 0
    ) -> Tensor:
        """Return this member's item of `parts`, which only `src` passes; `like` has the shape and dtype of one item."""
        ...

    def all_gather_object(self, python_object: Any) -> list[Any]:
        """Return every member's object, in order of rank.

        Raises: CommError on every member if an object cannot be sent.
        """
        ...

    def broadcast_object(self, python_object: Any, src: int = 0) -> Any:
        """Return the object of member `src`."""
        ...

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
    ) -> None:
        """Send and receive dense host tensors as `(position, tensor)` pairs, in the same order on both sides."""
        ...

    def barrier(self, label: str, timeout_s: float | None = None) -> None:
        """Block until every member has reached the barrier with this label.

        Raises: MissingRanksError naming the ranks that did not arrive in time and their current labels.
        """
        ...

    def make_twin(self) -> Comm:
        """Return a second, independent group over the same members, for a background thread."""
        ...
