"""Streaming on a device that does everything as late as it may: what is copied too early or read too soon is seen.

The stand-in executes a copy only when a computation waits for it, and keeps account of which memory was used up to which
point of the computing stream. A copy over memory whose last use the copying stream has not waited for is a race, however
the real device would have timed it.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten.extensions.bigmodel import dispatch
from hasten.extensions.bigmodel.placed import (
    StreamedForward,
    end_dispatch,
    streamers_of,
)
from hasten.extensions.bigmodel.stream import Streamer
from hasten.modules import forwarding
from hasten.runtime.streams import HostLanes, Mark, Pairs


class Box:
    """A mark: a point of one of the streams."""

    def __init__(self, point: int) -> None:
        self.point = point


class LateLanes(HostLanes):
    """Lanes of a device whose copies come as late as the marks allow, and whose computations may come later still."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.now = 0
        self.waited = -1
        self.pending: list[list[tuple[Tensor, Tensor]]] = []
        self.done = 0
        self.uses: list[tuple[int, int, int]] = []
        self.races: list[str] = []

    def empty(self, num_bytes: int, outlives_copies: bool = False) -> Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def mark(self) -> Mark:
        return Box(self.now)

    def fetch(self, pairs: Pairs, *marks: Mark) -> Mark:
        self.waited = max(self.waited, *(mark.point for mark in marks))
        batch = list(pairs)
        for target, _ in batch:
            start, stop = target.data_ptr(), target.data_ptr() + target.numel()
            late_uses = [
                use
                for use in self.uses
                if use[0] < stop and start < use[1] and use[2] > self.waited
            ]
            if late_uses:
                self.races.append(
                    f"copy over memory in use until {max(late_uses)[2]}, waited for {self.waited} only"
                )
        self.pending.append(batch)
        return Box(len(self.pending))

    def compute_waits(self, mark: Mark) -> None:
        while mark is not None and self.done < mark.point:
            for target, source in self.pending[self.done]:
                target.copy_(source)
            self.pending[self.done] = []
            self.done += 1

    def used(self, memory: Tensor) -> None:
        """The computing stream reads this memory now."""
        self.uses = [use for use in self.uses if use[2] > self.waited]
        self.uses.append(
            (
                memory.data_ptr(),
                memory.data_ptr() + memory.numel() * memory.element_size(),
                self.now,
            )
        )


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(x + self.down(torch.relu(self.up(x))))


class Uneven(nn.Module):
    """A large embedding and head, blocks of different sizes, a small norm: as language models are."""

    def __init__(self, rng: random.Random, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = (
            nn.Embedding(rng.choice([8, 200]), 8),
            nn.Linear(8, 200, bias=False),
        )
        if tied:
            self.head.weight = nn.Parameter(
                self.embed.weight.detach().repeat(25, 1)[:200]
            )
            self.embed.weight = self.head.weight
        sizes = [rng.choice([16, 16, 16, 40]) for _ in range(rng.randint(2, 7))]
        self.blocks = nn.ModuleList(Block(8, size) for size in sizes)
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: Tensor, order: list[int]) -> Tensor:
        x = self.embed(ids)
        for index in order:
            x = self.blocks[index](x)
        return torch.as_tensor(self.head(self.norm(x)))


def streamed(
    model: nn.Module, streams: LateLanes, monkeypatch: pytest.MonkeyPatch, resident: int
) -> None:
    """Offload the model as if to a device with these streams, and let them know what is used when."""
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "Streamer", partial(Streamer, lanes=streams))
        patch.setattr(Tensor, "is_pinned", lambda self: True)
        dispatch.cpu_offload(model, "cpu", resident=resident)
    (streamer,) = streamers_of(model)
    for unit in streamer.units:
        forward = forwarding.find(unit.module, StreamedForward.tag)
        assert isinstance(forward, StreamedForward)
        forward._acquire, forward._release = watching(streamer, streams)


def watching(streamer: Streamer, streams: LateLanes) -> tuple[Any, Any]:
    def acquire(index: int) -> None:
        streamer.acquire_unit(index)
        for pack in streamer.units[index].packs:
            for entry in pack.entries:
                table, name = entry.places[0]
                view = table[name]
                assert view is not None
                streams.used(view)

    def release(index: int) -> None:
        for pack in streamer.units[index].packs:  # until now it was in use
            for entry in pack.entries:
                table, name = entry.places[0]
                view = table[name]
                assert view is not None
                streams.used(view)
        streams.now += 1
        streamer.release_unit(index)

    return acquire, release


@pytest.mark.parametrize("start", range(0, 40, 10))
def test_no_copy_overtakes_a_use_and_no_use_a_copy(
    start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(start, start + 10):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        tied = rng.random() < 0.3
        model, streams = Uneven(rng, tied), LateLanes()
        count = len(model.blocks)
        passes = []
        for _ in range(8):
            chance = rng.random()
            order = (
                list(range(count))
                if chance < 0.6
                else [rng.randrange(count) for _ in range(rng.randint(0, count))]
            )
            passes.append((torch.randint(0, 8, (1, rng.choice([1, 1, 5]))), order))
        with torch.no_grad():
            expected = [model(ids, order) for ids, order in passes]
            streamed(model, streams, monkeypatch, resident=rng.choice([0, 0, 3000]))
            for turn, ((ids, order), right) in enumerate(
                zip(passes, expected, strict=True)
            ):
                assert torch.equal(model(ids, order), right), (seed, turn, order)
        assert streams.races == [], (seed, streams.races[:2])
        end_dispatch(model)


def test_the_stand_in_sees_a_copy_that_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The checker itself: streaming that forgets to wait for the last use is caught."""
    model, streams = Uneven(random.Random(1), False), LateLanes()
    streamed(model, streams, monkeypatch, 0)
    monkeypatch.setattr(LateLanes, "mark", lambda self: Box(-1))
    with torch.no_grad():
        for _ in range(2):
            model(torch.zeros(1, 2, dtype=torch.long), list(range(len(model.blocks))))
    assert streams.races
    end_dispatch(model)
