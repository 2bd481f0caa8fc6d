"""Toys: deterministic, trainable, and gentle with the global generator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hasten.testing.toys import TinyLM, next_token_loss, seeded
from tests.support.toys import (
    Blobs,
    Classifier,
    Line,
    LineData,
    Numbers,
    NumberStream,
    Sequences,
)


def have_equal_weights(left: nn.Module, right: nn.Module) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in zip(left.parameters(), right.parameters(), strict=True)
    )


def test_seeded_models_depend_on_the_seed_only() -> None:
    state = torch.get_rng_state()
    first = seeded(TinyLM)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert have_equal_weights(first, seeded(TinyLM))
    assert not have_equal_weights(first, seeded(TinyLM, seed=1))


def test_datasets_are_the_same_every_time() -> None:
    assert torch.equal(LineData(8).y, LineData(8).y)
    assert torch.equal(Blobs(8).points, Blobs(8).points)
    assert torch.equal(Sequences(8).tokens, Sequences(8).tokens)
    assert (
        [int(Numbers(3)[index]) for index in range(3)]
        == [int(x) for x in NumberStream(3)]
        == [0, 1, 2]
    )


def test_line_is_learned() -> None:
    model, data = Line(), LineData(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        F.mse_loss(model(data.x), data.y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert abs(model.a.item() - 2) < 0.1
    assert abs(model.b.item() - 3) < 0.1


def test_classes_are_learned() -> None:
    model, data = seeded(Classifier), Blobs(96)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(4):
        for points, labels in DataLoader(data, batch_size=16):
            optimizer.zero_grad()
            F.cross_entropy(model(points), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    assert (model(data.points).argmax(-1) == data.labels).float().mean() > 0.95


@pytest.mark.parametrize("tied", [False, True])
def test_sequences_are_learned(tied: bool) -> None:
    model, data = seeded(lambda: TinyLM(tied=tied)), Sequences()
    batch: dict[str, Tensor] = next(iter(DataLoader(data, batch_size=64)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = next_token_loss(model(batch["tokens"]), batch["labels"])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert (model.head.weight is model.embed.weight) is tied
