"""Random states of readers: np.random draws continue exactly, inside and outside of reading, whatever was drawn."""

from __future__ import annotations

import json
import pickle
import random
from contextlib import closing

import numpy as np
import pytest
import torch

from hasten.data.random_states import (
    OwnRng,
    RandomStates,
    decode_states,
    encode_states,
    seed_everything,
)
from hasten.errors import DataError

DRAWS = {
    "uniform": lambda: float(np.random.rand()),
    "one of a pair of normal numbers": lambda: float(np.random.randn()),
    "both of a pair": lambda: float(np.random.randn(2).sum()),
    "shuffled": lambda: float(np.random.permutation(700)[0]),
}


def draw_from_all() -> tuple[float, ...]:
    return (
        float(torch.rand(())),
        random.random(),
        float(np.random.rand()),
        float(np.random.randn()),
    )


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_reading_does_not_change_the_draws_of_the_training(draw: object) -> None:
    assert callable(draw)
    process = RandomStates()
    seed_everything(3)
    expected = [(draw(), draw_from_all()) for _ in range(700)]
    seed_everything(3)
    observed_draws = []
    for number in range(700):
        with process.kept():
            seed_everything(number)
            draw_from_all()
        first = draw()
        with process.kept(), process.kept():  # nested, and without a draw
            seed_everything(number)
        observed_draws.append((first, draw_from_all()))
    assert observed_draws == expected


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_reader_continues_where_its_last_block_ended(draw: object) -> None:
    assert callable(draw)
    process = RandomStates()
    seed_everything(5)
    expected = [draw() for _ in range(9)]
    seed_everything(99)
    with closing(OwnRng(5, process)) as first, closing(OwnRng(6, process)) as second:
        reader_draws = []
        for _ in range(9):
            with process.kept():
                with first.entered():
                    reader_draws.append(draw())
                with second.entered():
                    draw()
                seed_everything(1)
    assert reader_draws == expected


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_a_saved_state_continues_the_draws(num_blocks: int) -> None:
    process = RandomStates()
    rng = OwnRng(7, process)
    for _ in range(num_blocks):
        with process.kept(), rng.entered():
            np.random.randn()
    state = rng.state()
    assert state is not None
    saved = json.loads(json.dumps(encode_states(pickle.loads(pickle.dumps(state)))))
    resumed = OwnRng(0, process)
    resumed.place(decode_states(saved))
    drawn = []
    for reader_rng in (rng, resumed, resumed, rng):
        with process.kept(), reader_rng.entered():
            drawn.append(draw_from_all())
    assert drawn[0] == drawn[1]
    assert drawn[2] == drawn[3]


def test_a_reader_that_draws_nothing_has_no_state() -> None:
    process = RandomStates()
    rng = OwnRng(7, process)
    for _ in range(3):
        with process.kept(), rng.entered():
            pass
    assert rng.state() is None


def test_generators_are_reused_by_later_readers() -> None:
    process = RandomStates()
    used = set()
    for seed in range(4):
        with process.kept(), closing(OwnRng(seed, process)) as rng, rng.entered():
            used.add(id(np.random.get_bit_generator()))  # type: ignore[attr-defined] # missing in numpy's stubs
    assert len(used) == 1


def test_another_kind_of_generator_is_kept_and_refused_only_where_it_is_saved() -> None:
    process = RandomStates()
    default = np.random.get_bit_generator()  # type: ignore[attr-defined] # missing in numpy's stubs
    pcg_generator = np.random.PCG64(3)
    expected = np.random.RandomState(np.random.PCG64(3)).rand(2).tolist()
    try:
        np.random.set_bit_generator(pcg_generator)  # type: ignore[attr-defined]
        first = np.random.rand()
        with process.kept():
            seed_everything(1)
            np.random.rand()
        assert [first, np.random.rand()] == expected
        with pytest.raises(DataError, match=r"Use np\.random's default MT19937"):
            process.read()
    finally:
        np.random.set_bit_generator(default)  # type: ignore[attr-defined]
