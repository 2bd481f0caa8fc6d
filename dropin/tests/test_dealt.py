"""Batches that the main process deals out are filled with rows of the epoch's first batch."""

from types import SimpleNamespace

import torch

from accelerate._impl.loaders.dealt import Dealt
from hasten.data.position import Position


def test_a_first_batch_that_is_too_short_pads_all_the_same() -> None:
    items = [(torch.tensor([0]), None, False, None)]
    source = SimpleNamespace(open=lambda position: iter(items))
    dealt = Dealt(4, False, True, False, lambda batch, rows, rank, world: batch[rows])
    (step,) = dealt.rounds(source, Position())
    batches = [None if item is None else item[0].tolist() for item in step.items]
    assert batches == [[0]] * 4
