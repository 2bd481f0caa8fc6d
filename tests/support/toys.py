"""Small models and datasets that only the tests need; those of `hasten.testing.toys` are for `hasten test` too."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset

from hasten.testing.toys import TinyLM


class Experts(nn.Module):
    """Experts stacked into two weights; each token passes through those chosen for it."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.num_experts = number
        self.up = nn.Parameter(torch.randn(number, 2 * width, width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(number, width, 2 * width) * width**-0.5)

    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' results for each row of `hidden`."""
        out = torch.zeros_like(hidden)
        for expert in sorted(set(expert_ids.flatten().tolist())):
            rows, slots = torch.where(expert_ids == expert)
            expert_outputs = F.linear(
                F.gelu(F.linear(hidden[rows], self.up[expert])), self.down[expert]
            )
            out = out.index_add(
                0, rows, (expert_outputs * weights[rows, slots, None]).to(out.dtype)
            )
        return out


class MixtureBlock(nn.Module):
    """Mixture-of-experts block with a router that sends each token to `k` experts."""

    def __init__(self, number: int, width: int, k: int) -> None:
        super().__init__()
        self.k = k
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, number, bias=False)
        self.experts = Experts(number, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence after this block."""
        hidden = self.norm(x).flatten(0, -2)
        weights, expert_ids = self.router(hidden).softmax(-1).topk(self.k, -1)
        return x + self.experts(hidden, expert_ids, weights).view_as(x)  # type: ignore[no-any-return]


class TinyMixture(nn.Module):
    """Language model without attention, of mixture-of-experts blocks."""

    def __init__(
        self,
        vocab: int = 16,
        width: int = 8,
        experts: int = 4,
        k: int = 2,
        depth: int = 2,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            MixtureBlock(experts, width, k) for _ in range(depth)
        )
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at every position."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Attention of one sequence to another, or to itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.o = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor, causal: bool) -> Tensor:
        """Return the attention output of `x` over `context`."""
        projections = (
            layer(y) for layer, y in ((self.q, x), (self.k, context), (self.v, context))
        )
        q, k, v = (
            t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in projections
        )
        mixed = (
            F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            .transpose(1, 2)
            .flatten(2)
        )
        return self.o(mixed)  # type: ignore[no-any-return]


class TranslatorBlock(nn.Module):
    """Encoder or decoder block on a source and a target that are concatenated in one tensor."""

    def __init__(self, width: int, heads: int, decodes: bool, experts: int) -> None:
        super().__init__()
        self.norm1, self.mix = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width) if decodes else None
        self.cross = Attention(width, heads) if decodes else None
        self.norm3 = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.mixture = MixtureBlock(experts, width, 2) if experts else None

    def forward(self, x: Tensor, num_source: int) -> Tensor:
        """Return source and target after this block: an encoder changes the source, a decoder the target."""
        source, target = x[:, :num_source], x[:, num_source:]
        sequence = source if self.cross is None else target
        h = self.norm1(sequence)
        sequence = sequence + self.mix(h, h, causal=self.cross is not None)
        if self.cross is not None and self.norm2 is not None:
            sequence = sequence + self.cross(self.norm2(sequence), source, causal=False)
        sequence = sequence + self.down(F.gelu(self.up(self.norm3(sequence))))
        if self.mixture is not None:
            sequence = self.mixture(sequence)
        return torch.cat(
            [sequence, target] if self.cross is None else [source, sequence], 1
        )


class TinyTranslator(nn.Module):
    """Encoder-decoder whose state is one tensor, so that its blocks can be stages of a pipeline."""

    def __init__(
        self,
        vocab: int = 16,
        width: int = 8,
        heads: int = 4,
        context: int = 16,
        experts: int = 0,
    ) -> None:
        super().__init__()
        self.embed, self.position = (
            nn.Embedding(vocab, width),
            nn.Embedding(context, width),
        )
        self.blocks = nn.ModuleList(
            TranslatorBlock(width, heads, n >= 2, experts) for n in range(4)
        )
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_positions: Tensor,
        target_positions: Tensor,
    ) -> Tensor:
        """Return the logits of the token after each of `target`."""
        x = self.embed(torch.cat([source, target], 1)) + self.position(
            torch.cat([source_positions, target_positions], 1)
        )
        for block in self.blocks:
            x = block(x, source.shape[1])
        return self.head(x[:, source.shape[1] :])  # type: ignore[no-any-return]


class Scored(nn.Module):
    """Perceptron with dropout that returns its logits and, with labels, its loss, as a Trainer expects."""

    def __init__(
        self,
        features: int = 6,
        hidden: int = 12,
        classes: int = 3,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.body = Classifier(features, hidden, classes, dropout)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return the logits, and the loss if there are labels."""
        logits = self.body(x)
        return (
            {"logits": logits}
            if labels is None
            else {"loss": F.cross_entropy(logits, labels), "logits": logits}
        )


class Tagger(nn.Module):
    """Token classifier over sequences of different lengths; labels of -100 are ignored in its loss."""

    def __init__(self, vocab: int = 20, width: int = 8, tags: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, tags)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the logits of each token, and the loss if there are labels."""
        hidden = self.embed(input_ids) * attention_mask[..., None]
        logits = self.head(torch.tanh(self.mix(hidden)))
        if labels is None:
            return {"logits": logits}
        return {
            "loss": F.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=-100
            ),
            "logits": logits,
        }


class Rows(Dataset[dict[str, object]]):
    """Blobs as dicts with `x`, `label` and a column that no model uses."""

    def __init__(self, length: int = 40, features: int = 6, classes: int = 3) -> None:
        self._blobs = Blobs(length, features, classes)

    def __len__(self) -> int:
        return len(self._blobs)

    def __getitem__(self, index: int) -> dict[str, object]:
        point, label = self._blobs[index]
        return {"x": point, "label": int(label), "text": f"row {index}"}


class Tagged(Dataset[dict[str, list[int]]]):
    """Sequences of 1 to 9 tokens with one tag each."""

    def __init__(
        self, length: int = 30, vocab: int = 20, tags: int = 4, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.randint(1, 10, (length,), generator=generator).tolist()
        self._rows = [
            torch.randint(1, vocab, (size,), generator=generator).tolist()
            for size in sizes
        ]
        self._tags = tags

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        row = self._rows[index]
        return {"input_ids": row, "labels": [token % self._tags for token in row]}


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
        self,
        features: int = 8,
        hidden: int = 16,
        classes: int = 3,
        dropout: float = 0.0,
        batch_norm: bool = False,
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

    def __init__(
        self, length: int = 96, features: int = 8, classes: int = 3, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        centres = 2.0 * torch.randn(classes, features, generator=generator)
        self.labels = torch.arange(length) % classes
        self.points = centres[self.labels] + 0.5 * torch.randn(
            length, features, generator=generator
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.labels[index]


TINY_LM_PLAN: Final = MappingProxyType(
    {"embed": "embedding_rowwise", **TinyLM.tp_plan, "head": "colwise_gather_output"}
)
"""Tensor-parallel plan that splits every layer of a TinyLM."""


class Sequences(Dataset[dict[str, Tensor]]):
    """Sequences that count modulo `vocab` from a random start: `{"tokens", "labels"}`, the labels one ahead."""

    def __init__(
        self, length: int = 64, context: int = 16, vocab: int = 32, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(vocab, (length, 1), generator=generator)
        steps = torch.randint(1, 4, (length, 1), generator=generator)
        self.tokens = (starts + steps * torch.arange(context + 1)) % vocab

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.tokens[index]
        return {"tokens": row[:-1], "labels": row[1:]}
