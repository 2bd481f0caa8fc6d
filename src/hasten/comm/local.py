"""LocalComm: a group of one process, in which every collective is the identity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hasten.comm.base import ReduceKind
from hasten.comm.encoding import PLAIN
from hasten.errors import CommError


class LocalComm:
    """Group of one process."""

    def __init__(self, device: torch.device | str = "cpu", rank: int = 0) -> None:
        self.rank = 0
        self.size = 1
        self.ranks = (rank,)
        self.device = torch.device(device)
        self.codec = PLAIN

    def all_reduce(self, tensor: Tensor, kind: ReduceKind = "sum") -> Tensor:
        if kind == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor.float()
        if kind == "sum" and tensor.dtype == torch.bool:
            return tensor.long()
        return tensor.clone()

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0).clone()

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        _only_member(src)
        return tensor.clone()

    def scatter(
        self, parts: Sequence[Tensor] | None, like: Tensor, src: int = 0
    ) -> Tensor:
        _only_member(src)
        if parts is None or len(parts) != 1:
            raise CommError(
                f"scatter in a group of one got {None if parts is None else len(parts)} parts; it needs exactly one. "
                "Give one tensor per member of the group."
            )
        return parts[0].clone()

    def all_gather_object(
        self, python_object: Any
    ) -> list[Any]:  # Any: the caller's objects
        return [python_object]

    # Any: the caller's objects
    def broadcast_object(self, python_object: Any, src: int = 0) -> Any:
        _only_member(src)
        return python_object

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
    ) -> None:
        for member_position, _ in (*sends, *receives):
            _only_member(member_position)
        for (_, sent_tensor), (_, received_tensor) in zip(sends, receives, strict=True):
            received_tensor.copy_(sent_tensor)

    def barrier(self, label: str, timeout_s: float | None = None) -> None:
        return None

    def make_twin(self) -> LocalComm:
        return LocalComm(self.device, self.ranks[0])


def _only_member(src: int) -> None:
    if src != 0:
        raise CommError(
            f"src={src} is not a member of a group of one process; use src=0."
        )
