"""The last step of an epoch is the same for map-style data, streams and dispatched ones, on real ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from hasten import Accelerator, DataLoaderConfiguration
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from tests.support.loaders import (
    CountingStream,
    SeenBatches,
    global_order,
    on_every_rank,
    prepared,
    seen,
)

# Any in this file: loaders and batches of several kinds.


class Sized(CountingStream):
    def __len__(self) -> int:
        return self.size


def of_all(
    ctx: ProcessContext, data: Any, batch: int, drop_last: bool = False, **settings: Any
) -> list[list[SeenBatches]]:
    workers = settings.pop("workers", 0)
    options: dict[str, Any] = (
        {"multiprocessing_context": "fork", "num_workers": workers} if workers else {}
    )
    loader = prepared(
        DataLoader(data, batch_size=batch, drop_last=drop_last, **options),
        ctx=ctx,
        **settings,
    )
    return on_every_rank(ctx, seen(loader))


@ranks(2, exhaustive=(1, 3, 4))
def test_every_way_to_read_ends_alike(ctx: ProcessContext) -> None:
    sizes = (1, 2, 7, 50) if ctx.world.size == 2 else range(1, 30)
    for size, batch in itertools.product(sizes, (1, 3)):
        for drop_last, even, split in itertools.product((False, True), repeat=3):
            settings: dict[str, Any] = {"even_batches": even, "split_batches": split}
            rows = batch * ctx.world.size if split else batch
            expected_rows = of_all(ctx, range(size), rows, drop_last, **settings)
            for stream, dispatch in (
                (CountingStream(size), True),
                (Sized(size), True),
                (CountingStream(size), False),
            ):
                actual_rows = of_all(
                    ctx, stream, rows, drop_last, dispatch_batches=dispatch, **settings
                )
                assert actual_rows == expected_rows, (
                    type(stream),
                    dispatch,
                    size,
                    rows,
                    drop_last,
                    settings,
                )


@ranks(2, exhaustive=(3, 4))
def test_workers_of_a_dispatched_stream_end_as_those_of_a_sharded_one(
    ctx: ProcessContext,
) -> None:
    for size in (9, 14):
        expected_rows = of_all(ctx, CountingStream(size), 3, workers=2)
        assert (
            of_all(ctx, CountingStream(size), 3, workers=2, dispatch_batches=True)
            == expected_rows
        )
        assert sorted(global_order(expected_rows)) == list(range(size))


def trained(ctx: ProcessContext, data: Any, dispatch: bool) -> Any:
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    accelerator = Accelerator(context=ctx, dataloader_config=config)
    torch.manual_seed(0)
    model = nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=3)
    )
    for batch in loader:
        x = batch.double()[:, None] / 50
        loss = (model(x) - x.sin()).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("size", [50, 47])
@ranks(2)
def test_training_on_a_stream_ends_with_the_weights_of_map_style_data(
    ctx: ProcessContext, size: int
) -> None:
    expected_weights = trained(ctx, range(size), False)
    for data, dispatch in (
        (CountingStream(size), False),
        (Sized(size), False),
        (CountingStream(size), True),
    ):
        for actual_weight, expected_weight in zip(
            trained(ctx, data, dispatch), expected_weights, strict=True
        ):
            assert torch.equal(actual_weight, expected_weight)
