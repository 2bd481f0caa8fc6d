"""An iterator that is made and never used takes nothing from a loader: neither an epoch nor a resumed position."""

from __future__ import annotations

import io
from typing import Any

from torch.utils.data import DataLoader

import hasten
from hasten import Accelerator


def new_loader() -> Any:  # Any: a prepared loader of numbers
    hasten.set_seed(0)
    return Accelerator(cpu=True).prepare(
        DataLoader(list(range(16)), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    )


def read_batches(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def test_an_unused_iterator_takes_no_epoch() -> None:
    plain, touched = new_loader(), new_loader()
    iter(touched)
    iter(touched)
    assert read_batches(touched) == read_batches(plain)
    assert touched.state_dict() == plain.state_dict()


def test_a_bar_shows_the_resumed_batches() -> None:
    first = new_loader()
    all_batches, stopped = read_batches(first), new_loader()
    for _ in zip(range(5), stopped, strict=False):
        pass
    state, resumed = stopped.state_dict(), new_loader()
    resumed.load_state_dict(state)
    assert read_batches(hasten.tqdm(resumed, file=io.StringIO())) == all_batches[5:]
