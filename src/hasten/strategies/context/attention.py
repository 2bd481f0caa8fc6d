"""Causal attention over a sequence sharded over ranks, from this rank's queries and the gathered keys of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from hasten.strategies.context.ops import gather_shards
from hasten.strategies.context.sequence_plan import SequenceLayout

Attention = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Process group that shares a sequence, with the sequence's layout."""

    group: dist.ProcessGroup
    layout: SequenceLayout

    def gather_sequence(self, shard: Tensor, dim: int) -> Tensor:
        """Return the shards of all ranks in the order of the sequence, differentiable. Ranks: the group."""
        return order_chunks(gather_shards(shard, dim, self.group), self.layout, dim)


def order_chunks(joined: Tensor, sequence_layout: SequenceLayout, dim: int) -> Tensor:
    """Return the shards of all ranks, concatenated along `dim`, in the order of the sequence."""
    chunks = joined.chunk(sequence_layout.num_chunks, dim)
    return torch.cat(
        [chunks[chunk_index] for chunk_index in sequence_layout.chunk_order()], dim
    )


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sharing: SequenceGroup,
    scale: float,
    dropout_p: float = 0.0,
    attend: Attention = F.scaled_dot_product_attention,
) -> Tensor:
    """Compute causal attention of this rank's queries over the keys of all ranks, one chunk of queries at a time. Ranks: the group.

    Tensors are (batch, heads, length, width); keys and values may have fewer heads, each shared by several query heads.
    """
    keys = sharing.gather_sequence(key, -2)
    values = sharing.gather_sequence(value, -2)
    layout = sharing.layout
    outputs: list[Tensor] = []
    with _in_torch(attend):
        for chunk, queries in zip(
            layout.chunks_of(sharing.group.rank()),
            query.chunk(layout.chunks_per_rank, -2),
            strict=True,
        ):
            length = queries.shape[-2]
            num_keys = (chunk + 1) * length
            # torch cannot create the mask while a mode counts operations
            with torch._C._DisableTorchDispatch():
                mask = causal_lower_right(length, num_keys)
            outputs.append(
                attend(
                    queries,
                    keys[..., :num_keys, :],
                    values[..., :num_keys, :],
                    mask,
                    dropout_p,
                    scale=scale,
                    enable_gqa=query.shape[-3] != key.shape[-3],
                )
            )
    return torch.cat(outputs, -2)


@contextmanager
def _in_torch(attend: Attention) -> Iterator[None]:
    """Context manager in which torch.nn.functional has the original function, by which torch recognises its causal masks."""
    replacement = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = replacement
