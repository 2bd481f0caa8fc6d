"""Several loaders open at once: each has its own end and padding, and nobody guesses whose padding is meant."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hasten import Accelerator
from hasten.errors import DataError, StepError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks


# Any: a prepared loader
def loader_of(accelerator: Accelerator, size: int, batch: int = 1) -> Any:
    user: DataLoader[Any] = DataLoader(torch.arange(size), batch_size=batch)  # type: ignore[arg-type]
    return accelerator.prepare(user)


def updates(accelerator: Accelerator, steps: Iterator[Any], **named: Any) -> list[bool]:
    """Which micro-steps of a loop ended a window."""
    window_ends = []
    for _ in steps:
        with accelerator.accumulate(**named):
            window_ends.append(accelerator.sync_gradients)
    return window_ends


def expected(count: int, every: int) -> list[bool]:
    return [number % every == 0 or number == count for number in range(1, count + 1)]


def beside(first: Any, second: Any) -> Iterator[Any]:
    """The first loader by `for`, the second by `next`, begun anew as often as needed."""
    second_batches = iter(second)
    for batch in first:
        try:
            second_batch = next(second_batches)
        except StopIteration:
            second_batches = iter(second)
            second_batch = next(second_batches)
        yield batch, second_batch


@ranks(2, exhaustive=(1,))
def test_windows_end_with_the_loader_that_leads_the_loop(ctx: ProcessContext) -> None:
    r = random.Random(1)
    for _ in range(40):
        every, short = r.randint(1, 4), r.randint(1, 7)
        long = short + r.randint(0, 4)
        accelerator = Accelerator(context=ctx, gradient_accumulation_steps=every)
        first, second = (
            loader_of(accelerator, size * ctx.world.size) for size in (short, long)
        )
        for _ in range(2):
            assert updates(accelerator, zip(first, second, strict=False)) == expected(
                short, every
            )
            assert updates(accelerator, beside(second, first)) == expected(long, every)
            assert updates(accelerator, beside(first, second)) == expected(short, every)
            assert updates(
                accelerator, zip(second, first, strict=False), loader=first
            ) == expected(short, every)


@ranks(1, 2)
def test_an_evaluation_inside_a_loop_does_not_lead_it(ctx: ProcessContext) -> None:
    accelerator = Accelerator(context=ctx, gradient_accumulation_steps=2)
    train, evaluation = (
        loader_of(accelerator, 5 * ctx.world.size),
        loader_of(accelerator, 3 * ctx.world.size + 1, 2),
    )
    window_ends = []
    for _ in train:
        assert torch.cat(
            [accelerator.gather_for_metrics(x) for x in evaluation]
        ).tolist() == list(range(3 * ctx.world.size + 1))
        with accelerator.accumulate():
            window_ends.append(accelerator.sync_gradients)
    assert window_ends == expected(5, 2)


def test_a_loop_that_ends_unnoticed_is_refused() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    short, long = loader_of(accelerator, 4), loader_of(accelerator, 9)
    assert updates(accelerator, zip(long, short, strict=False)) == [
        False,
        False,
        True,
        False,
    ]
    with pytest.raises(StepError, match=r"zip\(short, long\)"):
        updates(accelerator, zip(long, short, strict=False))


@ranks(2, exhaustive=(3,))
def test_padding_is_dropped_for_the_loader_that_is_named(ctx: ProcessContext) -> None:
    accelerator = Accelerator(context=ctx)
    sizes = (7, 11)
    short, long = (loader_of(accelerator, size, 2) for size in sizes)
    for x, _ in zip(short, long, strict=False):
        with pytest.raises(DataError, match="loader="):
            accelerator.gather_for_metrics(x)
    of_short, of_long = [], []
    for x, y in zip(short, long, strict=False):
        of_short.append(accelerator.gather_for_metrics(x, loader=short))
        of_long.append(accelerator.gather_for_metrics(y, loader=long))
    assert torch.cat(of_short).tolist() == list(range(7))
    assert torch.cat(of_long).tolist() == list(
        range(min(11, len(of_long) * 2 * ctx.world.size))
    )


@ranks(2, 3)
def test_loaders_that_are_padded_alike_need_no_name(ctx: ProcessContext) -> None:
    accelerator = Accelerator(context=ctx)
    first_loader, second_loader = (
        loader_of(accelerator, 7, 2),
        loader_of(accelerator, 7, 2),
    )
    gathered = [
        accelerator.gather_for_metrics(x)
        for x, _ in zip(first_loader, second_loader, strict=True)
    ]
    assert torch.cat(gathered).tolist() == list(range(7))
