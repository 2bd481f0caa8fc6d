"""Small deterministic language model for tests and `hasten test`."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Final, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

M = TypeVar("M", bound=nn.Module)


def seeded(build: Callable[[], M], seed: int = 0) -> M:
    """Return the module made by `build`, with weights that depend only on `seed`; the global generator is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


class Block(nn.Module):
    """Transformer block: causal attention and a perceptron, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.o = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence after this block."""
        h = self.norm1(x)
        # -1 and not self.heads: under tensor parallelism each rank has only its share of the heads, and h may be a
        # shard of the tokens
        q, k, v = (
            layer(h).unflatten(-1, (-1, x.shape[-1] // self.heads)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )
        x = x + self.o(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


_BLOCK_PLAN: Final = (
    ("blocks.*.[qkv]", "colwise"),
    ("blocks.*.o", "rowwise"),
    ("blocks.*.up", "colwise"),
    ("blocks.*.down", "rowwise"),
)


class TinyLM(nn.Module):
    """Language model of transformer blocks; with `tied`, its head is its embedding."""

    tp_plan: Final = MappingProxyType(dict(_BLOCK_PLAN))

    def __init__(
        self,
        vocab: int = 32,
        width: int = 16,
        heads: int = 4,
        depth: int = 2,
        context: int = 32,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the logits of the next token at every position; `positions` defaults to the first ones."""
        if positions is None:
            positions = torch.arange(tokens.shape[-1], device=tokens.device)
        x = self.embed(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of the next token."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
