"""Gradients of a pipeline stage: averaged over data-parallel ranks, summed over the stages that share a weight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hasten.comm.base import Comm
from hasten.modules.names import is_dtensor
from hasten.runtime.mesh import group_of


@torch.no_grad()
def average(parameters: Iterable[nn.Parameter], comm: Comm) -> None:
    """Replace each gradient by its mean over the ranks of `comm`, with one message per dtype.

    A rank without a gradient of a parameter contributes zeros. Ranks: every rank of the group.
    """
    if comm.size == 1:
        return
    by_kind: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            by_kind.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    for same in by_kind.values():
        parts = [_part(p.grad) if p.grad is not None else torch.zeros_like(_part(p)) for p in same]
        there = parts[0].new_tensor([float(p.grad is not None) for p in same])
        joined = comm.all_reduce(torch.cat([there, *(part.reshape(-1) for part in parts)]), "mean")
        flags = joined[: len(same)].tolist()
        offset = len(same)
        for parameter, part, flag in zip(same, parts, flags, strict=True):
            if flag:
                part.copy_(joined[offset : offset + part.numel()].view_as(part))
                if parameter.grad is None:
                    _give(parameter, part)
            offset += part.numel()


def _part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor.detach()


def _give(parameter: nn.Parameter, part: Tensor) -> None:
    if is_dtensor(parameter):
        parameter.grad = type(parameter.data).from_local(  # type: ignore[attr-defined]  # a method of DTensor
            part,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    else:
        parameter.grad = part


@dataclass(slots=True)
class SharedWeights:
    """Parameters of one model that have copies on several ranks, such as tied embeddings.

    Each copy gets the gradient of its stage; the sum over copies is the gradient of the weight.
    """

    members: list[tuple[nn.Parameter, dist.ProcessGroup]] = field(default_factory=list)
    _aside: list[Tensor | None] = field(default_factory=list)

    def set_aside(self) -> None:
        """Set the gradients summed so far aside, so that new ones accumulate separately."""
        self._aside = [parameter.grad for parameter, _ in self.members]
        for parameter, _ in self.members:
            parameter.grad = None

    @torch.no_grad()
    def exchange(self) -> None:
        """Sum the gradients since `set_aside` over the ranks with a copy. Ranks: every rank with a copy."""
        for (parameter, group), earlier in zip(self.members, self._aside, strict=True):
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                _give(parameter, torch.zeros_like(_part(parameter)))
            assert parameter.grad is not None, "given just now"
            part = _part(parameter.grad).contiguous()
            dist.all_reduce(part, group=group)
            _part(parameter.grad).copy_(part)
            if earlier is not None:
                _part(parameter.grad).add_(_part(earlier))
        self._aside = []


def groups_of(holders: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Return a process group for each set of global ranks. Ranks: the members of each set, in the same order."""
    return {ranks: group_of(ranks) for ranks in dict.fromkeys(holders)}
