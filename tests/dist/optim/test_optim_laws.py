"""N processes times micro-batches equal one process with the big batch, whatever the weighting.

The optimizer is AdamW with its default eps. AdamW divides a gradient by its own size, so an element whose gradient is no
more than the rounding noise of a sum moves by the sign of that noise: such an element differs between any two orders of
summation. In float64 the noise is 1e-16 and no element of these runs comes near it: there the law holds to 1e-12. In float32
it holds to 1e-6 for runs without such an element, and those below are.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from hasten.accelerator.components import components
from hasten.accelerator.facade import Accelerator
from hasten.errors import HastenWarning
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

Batch = tuple[Tensor, Tensor]
STEPS = 20


def toy(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5)).to(dtype)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def batch(rows: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator), torch.randint(
        5, (rows,), generator=generator
    )


def big_batches(
    windows: Sequence[Sequence[Batch]],
    max_norm: float | None,
    epochs: int = 1,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """The reference: plain torch, each window one batch."""
    model = toy(dtype=dtype)
    optimizer = adam(model)
    schedule = CosineAnnealingLR(optimizer, STEPS)
    for _ in range(epochs):
        for window in windows:
            x, y = torch.cat([b[0] for b in window]), torch.cat([b[1] for b in window])
            torch.autograd.backward(nn.functional.cross_entropy(model(x.to(dtype)), y))
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model


def assert_same(model: nn.Module, reference: nn.Module, description: object) -> None:
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        tolerance = 1e-12 if b.dtype == torch.float64 else 1e-6
        torch.testing.assert_close(
            a, b, rtol=0, atol=tolerance, msg=lambda text: f"{description}: {text}"
        )


def train_windows(
    ctx: ProcessContext,
    every: int,
    rows: Sequence[int],
    weighted: bool,
    max_norm: float | None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Train on windows of `every` micro-batches per rank, and compare. `rows` is gone through in a circle."""
    size = ctx.world.size
    plan = [
        [
            [
                batch(
                    rows[(step + micro + rank) % len(rows)],
                    (step * every + micro) * size + rank,
                )
                for rank in range(size)
            ]
            for micro in range(every)
        ]
        for step in range(STEPS)
    ]
    accelerator = Accelerator(context=ctx, gradient_accumulation_steps=every)
    model = toy(dtype=dtype)
    optimizer = adam(model)
    model, optimizer, schedule = accelerator.prepare(
        model, optimizer, CosineAnnealingLR(optimizer, STEPS)
    )
    for window in plan:
        for micro, shares in enumerate(window):
            with accelerator.accumulate(model):
                x, y = shares[ctx.world.rank]
                loss = nn.functional.cross_entropy(model(x.to(dtype)), y)
                accelerator.backward(loss, weight=len(y) if weighted else None)
                norm = (
                    accelerator.clip_grad_norm_(model.parameters(), max_norm)
                    if max_norm is not None
                    else None
                )
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                assert accelerator.sync_gradients == (micro == every - 1)
                assert (norm is not None) == (
                    max_norm is not None and accelerator.sync_gradients
                )
    windows = [[share for shares in window for share in shares] for window in plan]
    reference = big_batches(windows, max_norm, dtype=dtype)
    assert_same(model, reference, (size, every, rows, weighted, max_norm, dtype))


@ranks(2, exhaustive=(1, 3, 4))
def test_mean_losses_equal_the_big_batch(ctx: ProcessContext) -> None:
    for every, max_norm in ((1, None), (1, 0.05), (2, 0.05), (3, None), (5, 0.05)):
        train_windows(ctx, every, rows=[3], weighted=False, max_norm=max_norm)


@ranks(2, exhaustive=(1, 3, 4))
def test_in_float64_nothing_but_rounding_is_left(ctx: ProcessContext) -> None:
    """What float32 cannot show because of its noise: the updates are the same to 1e-12, for every element."""
    for every, max_norm in ((1, None), (2, 0.05), (3, None)):
        train_windows(
            ctx, every, rows=[3], weighted=False, max_norm=max_norm, dtype=torch.float64
        )
        train_windows(
            ctx,
            every,
            rows=[1, 7, 3],
            weighted=True,
            max_norm=max_norm,
            dtype=torch.float64,
        )


@ranks(2, exhaustive=(1, 3, 4))
def test_weighted_losses_equal_the_big_batch_for_any_share(ctx: ProcessContext) -> None:
    for every, max_norm in ((1, None), (1, 0.05), (2, 0.05), (4, None)):
        train_windows(ctx, every, rows=[1, 7, 3], weighted=True, max_norm=max_norm)


@ranks(1, 2, exhaustive=(4,))
def test_short_last_windows_of_a_prepared_loader_count_fully(
    ctx: ProcessContext,
) -> None:
    size = ctx.world.size
    for every, per_rank in ((2, 5), (3, 4), (4, 3)):
        samples = [batch(1, seed) for seed in range(2 * size * per_rank)]
        data = [(x[0], y[0]) for x, y in samples]
        accelerator = Accelerator(context=ctx, gradient_accumulation_steps=every)
        model = toy(dtype=torch.float64)
        optimizer = adam(model)
        loader: torch.utils.data.DataLoader[Batch] = torch.utils.data.DataLoader(
            data,  # type: ignore[arg-type]
            batch_size=2,
        )
        with warnings.catch_warnings():
            # a schedule that happens to fit the undivided loader
            warnings.simplefilter("ignore", HastenWarning)
            model, optimizer, schedule, loader = accelerator.prepare(
                model, optimizer, CosineAnnealingLR(optimizer, STEPS), loader
            )
        updates = 0
        for _ in range(3):
            for x, y in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(
                        nn.functional.cross_entropy(model(x.double()), y)
                    )
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                    updates += accelerator.sync_gradients
        assert updates == 3 * -(-per_rank // every)
        assert schedule.last_epoch == updates, (
            "one step per update on any number of processes"
        )
        rows = 2 * size * every
        windows = [
            samples[start : start + rows] for start in range(0, len(samples), rows)
        ]
        assert_same(
            model,
            big_batches(windows, None, epochs=3, dtype=torch.float64),
            (size, every, per_rank),
        )


@ranks(2)
def test_weights_of_zero_on_one_rank_leave_the_others_share(
    ctx: ProcessContext,
) -> None:
    accelerator = Accelerator(context=ctx)
    model = toy()
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    shares = [batch(4, 0), batch(4, 1)]
    x, y = shares[ctx.world.rank]
    weight = torch.tensor(4 if ctx.world.rank == 0 else 0)
    accelerator.backward(nn.functional.cross_entropy(model(x), y), weight=weight)
    optimizer.step()
    reference = toy()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    torch.autograd.backward(
        nn.functional.cross_entropy(reference(shares[0][0]), shares[0][1])
    )
    plain.step()
    assert_same(model, reference, "only rank 0 counts")


@ranks(1, 2)
def test_half_precision_follows_the_float_curve(ctx: ProcessContext) -> None:
    """bf16 and fp16 losses stay within the rounding of their mantissas of the float32 curve (8 and 11 bits)."""
    curves: dict[str, list[float]] = {}
    for spec in ("no", "bf16", "fp16"):
        accelerator = Accelerator(context=ctx, mixed_precision=spec)
        assert (components(accelerator).precision.scaler is not None) == (
            spec == "fp16"
        )
        model = toy()
        model, optimizer = accelerator.prepare(model, adam(model))
        curves[spec] = []
        for step in range(STEPS):
            x, y = batch(8, step * ctx.world.size + ctx.world.rank)
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            assert not accelerator.optimizer_step_was_skipped
            curves[spec].append(accelerator.reduce(loss.detach(), "mean").item())
    torch.testing.assert_close(curves["bf16"], curves["no"], rtol=2e-2, atol=0)
    torch.testing.assert_close(curves["fp16"], curves["no"], rtol=2e-3, atol=0)


@ranks(1, 2)
def test_a_failed_micro_step_leaves_no_trace(ctx: ProcessContext) -> None:
    """An error inside accumulate(), cleared or not by the except block, and training goes on with true means."""
    for clears in (False, True):
        accelerator = Accelerator(context=ctx, gradient_accumulation_steps=2)
        model = toy()
        model, optimizer = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1)
        )
        reference = toy()
        plain = torch.optim.SGD(reference.parameters(), lr=0.1)
        for step in (0, 1, 2):
            x, y = batch(4, step)
            try:
                with accelerator.accumulate(model):
                    if step == 1:
                        raise MemoryError
                    accelerator.backward(nn.functional.cross_entropy(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
            except MemoryError:
                if clears:
                    optimizer.zero_grad()
        counted_batches = [batch(4, 2)] if clears else [batch(4, 0), batch(4, 2)]
        for x, y in counted_batches:
            torch.autograd.backward(
                nn.functional.cross_entropy(reference(x), y) / len(counted_batches)
            )
        plain.step()
        assert_same(model, reference, clears)


@ranks(1, 2, 3)
def test_an_epoch_broken_off_without_an_update_does_not_move_the_schedule(
    ctx: ProcessContext,
) -> None:
    """A schedule called once per epoch counts the epochs that had an update; the open window goes on."""
    accelerator = Accelerator(context=ctx, gradient_accumulation_steps=3)
    model = toy()
    optimizer = adam(model)
    loader: torch.utils.data.DataLoader[Batch] = torch.utils.data.DataLoader(
        [
            (x[0], y[0])
            for x, y in (batch(1, seed) for seed in range(12 * ctx.world.size))
        ],  # type: ignore[arg-type]
        batch_size=2,
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, schedule, loader = accelerator.prepare(
        model, optimizer, schedule, loader
    )
    counted, updates = [], 0
    for stop in (2, 1, 2, 1, 6):  # micro-steps of each epoch; 3 make an update
        previous_updates = updates
        for number, (x, y) in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                updates += accelerator.sync_gradients
            if number + 1 == stop:
                break
        schedule.step()
        counted.append((updates > previous_updates, schedule.last_epoch))
    assert counted == [(False, 0), (True, 1), (False, 1), (True, 2), (True, 3)]


@ranks(1)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_schedules_that_follow_nothing_count_every_epoch(ctx: ProcessContext) -> None:
    accelerator = Accelerator(
        context=ctx, gradient_accumulation_steps=3, step_scheduler_with_optimizer=False
    )
    model = toy()
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for epoch in range(3):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 6)).sum())
            optimizer.step()
        if epoch < 2:
            schedule.step()
    assert schedule.last_epoch == 2
