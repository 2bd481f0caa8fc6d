"""Samplers that remember something resume in any epoch with the order they would have drawn, or are refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from hasten.data.carried_state import CarriedState
from hasten.errors import DataError
from tests.support.loaders import prepared, seen

# Any in this file: generators of many kinds.
SIZE: Final = 13
HIDDEN: Final = iter(range(10**9))


class GeneratorSampler(Sampler[int]):
    """Draws each epoch from what it owns."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.rng = make()

    def __iter__(self) -> Iterator[int]:
        if isinstance(self.rng, torch.Generator):
            return iter(torch.randperm(SIZE, generator=self.rng).tolist())
        if isinstance(self.rng, random.Random):
            return iter(self.rng.sample(range(SIZE), SIZE))
        return iter(np.asarray(self.rng.permutation(SIZE)).tolist())


class NestedGeneratorSampler(Sampler[int]):
    """Owns a generator through a list and slots."""

    class Box:
        __slots__ = ("rng",)

        def __init__(self) -> None:
            self.rng = np.random.default_rng(1)

    def __init__(self) -> None:
        self.boxes = [self.Box()]

    def __iter__(self) -> Iterator[int]:
        return iter(self.boxes[0].rng.permutation(SIZE).tolist())


class EpochCountingSampler(Sampler[int]):
    """Counts its epochs."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(random.Random(self.passes).sample(range(SIZE), SIZE))


class InPlaceSampler(Sampler[int]):
    """Shuffles its own list again and again."""

    def __init__(self) -> None:
        self.order = np.arange(SIZE)

    def __iter__(self) -> Iterator[int]:
        np.random.default_rng(0).shuffle(self.order)
        return iter(self.order.tolist())


class StatefulSampler(EpochCountingSampler):
    """Says itself what it remembers, in an attribute that inspection passes over."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = iter(range(10**9))

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(next(self.hidden)).sample(range(SIZE), SIZE))

    def state_dict(self) -> dict[str, Any]:
        position = self.hidden.__reduce__()[2]
        return {"at": position, "as": (1, torch.tensor([position]))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["as"] == (1, torch.tensor([state["at"]]))
        self.hidden = iter(range(state["at"], 10**9))


class GlobalCounterSampler(Sampler[int]):
    """Remembers where nobody finds it."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(next(HIDDEN)).sample(range(SIZE), SIZE))


KINDS: Final[dict[str, Callable[[], Any]]] = {
    "numpy PCG64": lambda: GeneratorSampler(lambda: np.random.default_rng(3)),
    "numpy MT19937": lambda: GeneratorSampler(
        lambda: np.random.Generator(np.random.MT19937(3))
    ),
    "numpy Philox": lambda: GeneratorSampler(
        lambda: np.random.Generator(np.random.Philox(3))
    ),
    "numpy SFC64": lambda: GeneratorSampler(
        lambda: np.random.Generator(np.random.SFC64(3))
    ),
    "numpy RandomState": lambda: GeneratorSampler(lambda: np.random.RandomState(3)),
    "python": lambda: GeneratorSampler(lambda: random.Random(3)),
    "torch": lambda: GeneratorSampler(lambda: torch.Generator().manual_seed(3)),
    "nested": NestedGeneratorSampler,
    "counting": EpochCountingSampler,
    "in place": InPlaceSampler,
    "state_dict": StatefulSampler,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_in_any_epoch_draws_what_the_run_would_have_drawn(kind: str) -> None:
    def build() -> Any:
        return prepared(DataLoader(range(SIZE), batch_size=2, sampler=KINDS[kind]()))  # type: ignore[arg-type]

    uninterrupted = build()
    epochs = [seen(uninterrupted) for _ in range(4)]
    assert len({str(epoch) for epoch in epochs}) == 4, "every epoch has another order"
    for epoch in range(3):
        for stop in (0, 1, 4, 7):
            first = build()
            for _ in range(epoch):
                seen(first)
            if stop:
                seen(first, limit=stop)
            state = json.loads(json.dumps(first.state_dict()))
            second = build()
            second.load_state_dict(state)
            assert seen(second) == epochs[epoch][stop:], f"epoch {epoch} after {stop}"
            assert seen(second) == epochs[epoch + 1]


def test_a_memory_that_cannot_be_found_is_refused() -> None:
    def build() -> Any:
        return prepared(
            DataLoader(range(SIZE), batch_size=2, sampler=GlobalCounterSampler())  # type: ignore[arg-type]
        )

    first = build()
    seen(first)
    seen(first, limit=3)
    second = build()
    second.load_state_dict(first.state_dict())
    with pytest.raises(DataError, match="drew a different order"):
        seen(second)


def test_a_state_of_another_sampler_is_refused() -> None:
    state = CarriedState(KINDS["python"]()).capture()
    with pytest.raises(DataError, match="no such attribute"):
        CarriedState(InPlaceSampler()).restore(state)
    with pytest.raises(DataError, match="does not fit"):
        CarriedState(KINDS["torch"]()).restore(state)


def test_memory_is_plain_data_and_small() -> None:
    sampler = KINDS["in place"]()
    sampler.data = list(range(10**6))
    memory = CarriedState(sampler)
    assert memory.capture() is None, "nothing has changed"
    list(sampler)
    sampler.data.append(1)
    assert len(json.dumps(memory.capture())) < 1000
