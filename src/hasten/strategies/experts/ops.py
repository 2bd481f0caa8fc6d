"""The exchange of tokens between ranks that hold different experts: uneven, and differentiable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Any in this file: the context and the gradients of torch.autograd.Function, which torch leaves untyped.


class _Exchange(torch.autograd.Function):
    """Rows sent to the ranks they are meant for; gradients take the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchanged(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _exchanged(grad, ctx.received, ctx.sent, ctx.group), None, None, None


class _Share(torch.autograd.Function):
    """The identity whose gradient is divided by a number of ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad / ctx.ranks, None


def share(x: Tensor, ranks: int) -> Tensor:
    """`x`, whose gradient is a sum over `ranks` and becomes the mean."""
    made: Tensor = _Share.apply(x, ranks)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return made


def exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send `sent[i]` consecutive rows to rank i and return the `received[i]` rows of each, differentiable. Ranks: the group."""
    made: Tensor = _Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return made


def _exchanged(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(arrived, x.contiguous(), received, sent, group=group)
    return arrived


@dataclass(frozen=True, slots=True)
class Route:
    """Which of this rank's choices go to which rank, and what arrives for this rank's experts."""

    order: Tensor
    """The choices (token after token, best first) in the order in which they are sent."""
    local: Tensor
    """For each row that arrives, the expert it is for, counted from this rank's first."""
    sent: list[int]
    received: list[int]
    group: dist.ProcessGroup

    def there(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks that are for this rank's experts, from one row per choice. Ranks: the group."""
        return exchange(rows[self.order], self.sent, self.received, self.group)

    def back(self, rows: Tensor) -> Tensor:
        """What the experts made of this rank's choices, one row per choice. Ranks: the group."""
        arrived = exchange(rows, self.received, self.sent, self.group)
        return arrived.new_zeros(arrived.shape).index_copy(0, self.order, arrived)


@torch.no_grad()
def route(choices: Tensor, num_experts: int, group: dist.ProcessGroup) -> Route:
    """Return the way of each choice to its expert's rank; experts are divided evenly, in order. Ranks: the group."""
    each = num_experts // group.size()
    counts = torch.bincount(choices, minlength=num_experts)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)  # for each rank, how many choices of each expert here
    experts = torch.arange(each, device=choices.device).repeat(group.size())
    return Route(
        order=torch.argsort(choices, stable=True),
        local=experts.repeat_interleave(theirs),
        sent=counts.view(-1, each).sum(1).tolist(),
        received=theirs.view(-1, each).sum(1).tolist(),
        group=group,
    )
