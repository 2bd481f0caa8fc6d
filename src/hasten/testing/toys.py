"""Small deterministic models and datasets for tests, examples of failures and `hasten test`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Final, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset

M = TypeVar("M", bound=nn.Module)


def seeded(build: Callable[[], M], seed: int = 0) -> M:
    """Return the module made by `build`, with weights that depend only on `seed`; the global generator is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


class Line(nn.Module):
    """y = a x + b with scalar parameters: the smallest model that can be trained."""

    def __init__(self, a: float = 0.0, b: float = 0.0) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(float(a)))
        self.b = nn.Parameter(torch.tensor(float(b)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the value of the line at `x`."""
        return self.a * x + self.b


class LineData(Dataset[dict[str, Tensor]]):
    """Points `{"x", "y"}` near the line y = 2 x + 3."""

    def __init__(self, length: int = 64, seed: int = 42, noise: float = 0.1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(length, generator=generator)
        self.y = 2.0 * self.x + 3.0 + noise * torch.randn(length, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


class Numbers(Dataset[Tensor]):
    """Numbers 0 to length - 1 as samples, which show the samples each rank reads."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


class NumberStream(IterableDataset[Tensor]):
    """Numbers 0 to length - 1 as an iterable dataset."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor(number) for number in range(self.length))


class Classifier(nn.Module):
    """Perceptron with one hidden layer and optional batch norm and dropout."""

    def __init__(
        self, features: int = 8, hidden: int = 16, classes: int = 3, dropout: float = 0.0, batch_norm: bool = False
    ) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, hidden)
        self.norm = nn.BatchNorm1d(hidden) if batch_norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of each class."""
        return self.head(self.dropout(F.relu(self.norm(self.hidden(x)))))  # type: ignore[no-any-return]


class Blobs(Dataset[tuple[Tensor, Tensor]]):
    """Points around one centre per class, with the class as label."""

    def __init__(self, length: int = 96, features: int = 8, classes: int = 3, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        centres = 2.0 * torch.randn(classes, features, generator=generator)
        self.labels = torch.arange(length) % classes
        self.points = centres[self.labels] + 0.5 * torch.randn(length, features, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.labels[index]


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
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


_BLOCK_PLAN: Final = (
    ("blocks.*.[qkv]", "colwise"),
    ("blocks.*.o", "rowwise"),
    ("blocks.*.up", "colwise"),
    ("blocks.*.down", "rowwise"),
)
TINY_LM_PLAN: Final = MappingProxyType(
    {"embed": "embedding_rowwise", **dict(_BLOCK_PLAN), "head": "colwise_gather_output"}
)
"""Tensor-parallel plan that splits every layer of a TinyLM."""


class TinyLM(nn.Module):
    """Language model of transformer blocks; with `tied`, its head is its embedding."""

    tp_plan: Final = MappingProxyType(dict(_BLOCK_PLAN))

    def __init__(
        self, vocab: int = 32, width: int = 16, heads: int = 4, depth: int = 2, context: int = 32, tied: bool = False
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


class Sequences(Dataset[dict[str, Tensor]]):
    """Sequences that count modulo `vocab` from a random start: `{"tokens", "labels"}`, the labels one ahead."""

    def __init__(self, length: int = 64, context: int = 16, vocab: int = 32, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(vocab, (length, 1), generator=generator)
        steps = torch.randint(1, 4, (length, 1), generator=generator)
        self.tokens = (starts + steps * torch.arange(context + 1)) % vocab

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.tokens[index]
        return {"tokens": row[:-1], "labels": row[1:]}


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of the next token."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
