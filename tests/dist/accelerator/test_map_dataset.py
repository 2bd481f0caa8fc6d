"""A function mapped over a dataset on all ranks: every result, in order, on every rank."""

from __future__ import annotations

import pytest
import torch

from hasten import Accelerator, map_dataset
from hasten.errors import PeerFailedError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks


@ranks(1, 2, 4)
def test_results_come_in_order_on_every_rank(ctx: ProcessContext) -> None:
    accelerator = Accelerator()
    for count in (0, 1, 3, 9):
        mapped = map_dataset(
            accelerator,
            lambda item: {"square": torch.tensor(item**2)},
            list(range(count)),
        )
        assert [int(sample["square"]) for sample in mapped] == [
            n**2 for n in range(count)
        ]


@ranks(2)
def test_an_error_on_one_rank_reaches_all(ctx: ProcessContext) -> None:
    def fails(item: int) -> int:
        if item == 3:
            raise ValueError("no third item")
        return item

    with pytest.raises(
        ValueError if ctx.world.rank == 1 else PeerFailedError, match="no third item"
    ):
        map_dataset(Accelerator(), fails, range(4))
