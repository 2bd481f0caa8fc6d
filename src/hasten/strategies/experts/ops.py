"""Differentiable, uneven exchange of tokens between the ranks that hold different experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Any in this file: the context and the gradients of torch.autograd.Function, which torch leaves untyped.


class _ExchangeTokens(torch.autograd.Function):
    """All-to-all of rows with uneven sizes; gradients take the reverse direction."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        sent_rows: list[int],
        received_rows: list[int],
        process_group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.sent = sent_rows
        ctx.received = received_rows
        ctx.group = process_group
        return _all_to_all(tensor, sent_rows, received_rows, process_group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _all_to_all(grad, ctx.received, ctx.sent, ctx.group), None, None, None


class _Share(torch.autograd.Function):
    """Identity whose gradient is divided by a number of ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, num_ranks: int) -> Tensor:
        ctx.ranks = num_ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad / ctx.ranks, None


def scale_gradient(tensor: Tensor, num_ranks: int) -> Tensor:
    """Return `x`, with its gradient (a sum over `ranks`) divided by `ranks`."""
    output: Tensor = _Share.apply(tensor, num_ranks)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return output


def exchange_rows(
    rows: Tensor,
    sent_rows: list[int],
    received: list[int],
    process_group: dist.ProcessGroup,
) -> Tensor:
    """Send `sent[i]` consecutive rows to rank i and return the `received[i]` rows from each. Ranks: the group."""
    received_rows: Tensor = _ExchangeTokens.apply(
        rows, sent_rows, received, process_group
    )  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return received_rows


def _all_to_all(
    tensor: Tensor,
    sent_rows: list[int],
    received: list[int],
    process_group: dist.ProcessGroup,
) -> Tensor:
    received_rows = tensor.new_empty((sum(received), *tensor.shape[1:]))
    dist.all_to_all_single(
        received_rows, tensor.contiguous(), received, sent_rows, group=process_group
    )
    return received_rows


@dataclass(frozen=True, slots=True)
class Route:
    """Routing of this rank's (token, expert) choices to the experts' ranks, and of the rows that arrive here."""

    order: Tensor
    """Indices of the choices (token by token, best first) in the order of sending."""
    local: Tensor
    """Expert of each row that arrives, as an index among this rank's experts."""
    sent: list[int]
    received: list[int]
    group: dist.ProcessGroup

    def send_to_experts(self, rows: Tensor) -> Tensor:
        """Send one row per choice to its expert's rank, and return the rows for this rank's experts. Ranks: the group."""
        return exchange_rows(rows[self.order], self.sent, self.received, self.group)

    def return_to_tokens(self, rows: Tensor) -> Tensor:
        """Send the experts' outputs back, and return one row per choice of this rank. Ranks: the group."""
        arrived = exchange_rows(rows, self.received, self.sent, self.group)
        return arrived.new_zeros(arrived.shape).index_copy(0, self.order, arrived)


@torch.no_grad()
def route_tokens(
    choices: Tensor, num_experts: int, process_group: dist.ProcessGroup
) -> Route:
    """Return the route of each choice to its expert's rank; experts are sharded evenly, in order. Ranks: the group."""
    experts_per_rank = num_experts // process_group.size()
    counts = torch.bincount(choices, minlength=num_experts)
    received_counts = torch.empty_like(counts)
    dist.all_to_all_single(
        received_counts, counts, group=process_group
    )  # for each rank, its number of choices of each expert here
    local_numbers = torch.arange(experts_per_rank, device=choices.device).repeat(
        process_group.size()
    )
    return Route(
        order=torch.argsort(choices, stable=True),
        local=local_numbers.repeat_interleave(received_counts),
        sent=counts.view(-1, experts_per_rank).sum(1).tolist(),
        received=received_counts.view(-1, experts_per_rank).sum(1).tolist(),
        group=process_group,
    )
