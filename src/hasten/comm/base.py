"""The Comm protocol: what every group of processes can do with single tensors and objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from hasten.comm.envelopes import Envelopes
from hasten.comm.session import Session

ReduceKind = Literal["sum", "mean", "min", "max"]


class Comm(Protocol):
    """A group of processes. Every method is a call for every member, in the same order.

    Positions (`rank`, `src`) count inside the group; `ranks` holds the members' global ranks.
    Results come back on the device of the argument; arguments are never changed.
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
    def envelopes(self) -> Envelopes:
        """What collectives on trees keep for this group between two calls."""
        ...

    def all_reduce(self, x: Tensor, kind: ReduceKind = "sum") -> Tensor:
        """The elementwise sum, mean, min or max over the members. Booleans sum to int64 counts; means are floats."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every member's tensor, stacked as `(size, *x.shape)`. Shapes must be equal."""
        ...

    def all_gather_bytes(self, x: Tensor, out: Tensor) -> None:
        """Every member's bytes, written to `out` one after the other. Both lie in host memory."""
        ...

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        """Return the tensor of member `src`. Shape and dtype must be equal everywhere."""
        ...

    def scatter(self, parts: Sequence[Tensor] | None, like: Tensor, src: int = 0) -> Tensor:
        """Return this member's part of `parts`, which only `src` gives; `like` has the shape and dtype of one part."""
        ...

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return every member's object, in order of rank.

        Raises: CommError on every member if an object cannot be sent, or was not sent by a member.
        """
        ...

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return the object of member `src`."""
        ...

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Send and receive dense tensors in host memory between pairs of members: `(position, tensor)`, in the same order on both sides."""
        ...

    def session(self) -> Session:
        """Return the seal for objects that travel inside tensors, agreed on at first use."""
        ...

    def barrier(self, label: str, timeout_s: float | None = None) -> None:
        """Wait until every member is at the barrier with this label.

        Raises: MissingRanksError naming the ranks that did not come in time and where they are instead.
        """
        ...

    def twin(self) -> Comm:
        """Return a second, independent group over the same members, for a background thread."""
        ...
