"""The promise: N processes with micro-batches train exactly like one process with the big batch, in plain torch.

float32 sums in another order differ in the last bits; over 20 steps that stays under 1e-6 for these models.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hasten import Accelerator
from hasten.comm.local import LocalComm
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh import Groups
from hasten.runtime.mesh_plan import MeshSpec
from hasten.runtime.topology import Topology
from hasten.testing.pool import ranks

STEPS = 20
WIDTH = 6


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(rows: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """STEPS global batches of inputs, labels and token counts per row."""
    g = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(rows, WIDTH, generator=g),
            torch.randint(0, 3, (rows,), generator=g),
            torch.randint(1, 9, (rows,), generator=g).float(),
        )
        for _ in range(STEPS)
    ]


def plain_torch(rows: int, weighted: bool, max_norm: float | None) -> nn.Module:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for x, y, tokens in batches(rows):
        losses = F.cross_entropy(model(x), y, reduction="none")
        loss = (losses * tokens).sum() / tokens.sum() if weighted else losses.mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        scheduler.step()
    return model


def with_hasten(
    ctx: ProcessContext, rows: int, every: int, weighted: bool, max_norm: float | None
) -> nn.Module:
    accelerator = Accelerator(gradient_accumulation_steps=every)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    prepared, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for full_batch in batches(rows):
        rank_chunks = [
            tensor.chunk(ctx.world.size)[ctx.rank].chunk(every) for tensor in full_batch
        ]
        for x, y, tokens in zip(*rank_chunks, strict=True):
            with accelerator.accumulate(prepared):
                losses = F.cross_entropy(prepared(x), y, reduction="none")
                if weighted:
                    accelerator.backward(
                        (losses * tokens).sum() / tokens.sum(), weight=tokens.sum()
                    )
                else:
                    accelerator.backward(losses.mean())
                if max_norm is not None:
                    accelerator.clip_grad_norm_(prepared.parameters(), max_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    assert scheduler.last_epoch == STEPS
    return model


@ranks(1, 2, exhaustive=(3, 4))
@pytest.mark.parametrize("every", [1, 2, 5])
def test_many_processes_and_micro_steps_equal_one_big_batch(
    ctx: ProcessContext, every: int
) -> None:
    rows = 12 * every
    for weighted in (False, True):
        for max_norm in (None, 0.05):
            expected = plain_torch(rows, weighted, max_norm).state_dict()
            for name, value in (
                with_hasten(ctx, rows, every, weighted, max_norm).state_dict().items()
            ):
                torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


@ranks(1, 2, exhaustive=(4,))
@pytest.mark.parametrize("every", [2, 3, 5])
def test_a_short_last_window_counts_as_what_it_is(
    ctx: ProcessContext, every: int
) -> None:
    """Loader ends inside a window: the last update is the mean over the micro-steps there were."""
    world = ctx.world.size
    steps_per_epoch, micro = every + 1, 2
    rows = steps_per_epoch * micro * world
    g = torch.Generator().manual_seed(3)
    x, y = (
        torch.randn(rows, WIDTH, generator=g),
        torch.randint(0, 3, (rows,), generator=g),
    )
    accelerator = Accelerator(gradient_accumulation_steps=every)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, y), batch_size=micro)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    updates = []
    for _ in range(2):
        for bx, by in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(F.cross_entropy(prepared(bx), by))
                optimizer.step()
                optimizer.zero_grad()
                updates.append(accelerator.sync_gradients)
    window = [False] * (every - 1) + [True]
    assert updates == [*window, True] * 2
    plain = network()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        for start, end in ((0, every * micro * world), (every * micro * world, rows)):
            reference.zero_grad()
            F.cross_entropy(plain(x[start:end]), y[start:end]).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            reference.step()
    for value, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)


@ranks(2, exhaustive=(1, 3, 4))
def test_every_metric_sample_once(ctx: ProcessContext) -> None:
    """For every size, batch and option the gathered labels are the dataset, no more and no less."""
    accelerator = Accelerator()
    for size in (1, 2, 5, 7, 16, 23):
        for batch_size in (1, 3, 4):
            for shuffle in (False, True):
                data = TensorDataset(
                    torch.arange(size), torch.arange(size).float().unsqueeze(1) * 2
                )
                loader = accelerator.prepare(
                    DataLoader(data, batch_size=batch_size, shuffle=shuffle)
                )
                gathered_indices: list[int] = []
                objects: list[str] = []
                for index, value in loader:
                    out: dict[str, Any] = accelerator.gather_for_metrics(
                        {"i": index, "v": (value, "kept")}
                    )
                    assert torch.equal(out["v"][0][:, 0], out["i"].float() * 2)
                    gathered_indices += out["i"].tolist()
                    objects += accelerator.gather_for_metrics(
                        [str(i) for i in index.tolist()], use_gather_object=True
                    )
                assert sorted(gathered_indices) == list(range(size)), (
                    size,
                    batch_size,
                    shuffle,
                )
                assert sorted(objects, key=int) == [str(i) for i in range(size)]
                accelerator.free_memory()


def train(accelerator: Accelerator, steps: int = 12) -> list[float]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for x, y, _ in batches(12)[:steps]:
        rank_tensors = [
            tensor.chunk(accelerator.num_processes)[accelerator.process_index]
            for tensor in (x, y)
        ]
        loss = F.cross_entropy(prepared(rank_tensors[0]), rank_tensors[1])
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


@ranks(2, exhaustive=(1, 4))
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_every_precision_and_strategy_follows_plain_torch(
    ctx: ProcessContext, precision: str, strategy: str
) -> None:
    """bf16 keeps 8 bits of a product, fp16 11: losses around 1 agree to about two digits and to three."""
    expected = train(Accelerator(strategy="none", context=alone(ctx)))
    tolerance = {"no": 1e-5, "bf16": 3e-2, "fp16": 5e-3}[precision]
    actual_losses = train(Accelerator(mixed_precision=precision, strategy=strategy))
    torch.testing.assert_close(
        torch.tensor(actual_losses), torch.tensor(expected), rtol=0, atol=tolerance
    )


def alone(ctx: ProcessContext) -> ProcessContext:
    """A context of this process by itself, beside the world it is in."""
    mesh, world = MeshSpec.flat(1), LocalComm()
    return ProcessContext(
        Topology(), mesh, ctx.device, world, Groups(mesh, 0, world, None, 60.0)
    )


@ranks(1, 2)
def test_two_accelerators_do_not_disturb_each_other(ctx: ProcessContext) -> None:
    first = Accelerator(gradient_accumulation_steps=4, mixed_precision="bf16")
    second = Accelerator()
    assert (first.gradient_accumulation_steps, second.gradient_accumulation_steps) == (
        4,
        1,
    )
    a, b = first.prepare_model(network()), second.prepare_model(network())
    with first.accumulate(a):
        assert not first.sync_gradients
        assert second.sync_gradients
    assert (first.config.mixed_precision, second.config.mixed_precision) == (
        "bf16",
        "no",
    )
    assert len(first._prepared.models) == len(second._prepared.models) == 1
    assert torch.equal(
        b(torch.ones(1, WIDTH)), second.unwrap_model(b)(torch.ones(1, WIDTH))
    )


@ranks(1, 2)
def test_loops_broken_off_nested_and_failing_keep_the_clock_right(
    ctx: ProcessContext,
) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=3)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(24, WIDTH), torch.randint(0, 3, (24,)))
    model, optimizer, train_loader, eval_loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=2), DataLoader(data, batch_size=5)
    )

    def step(x: Tensor, y: Tensor) -> bool:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            return accelerator.sync_gradients

    pattern = []
    for number, (x, y) in enumerate(train_loader):
        if number == 4:
            break
        pattern.append(step(x, y))
        for _ in eval_loader:  # evaluation inside training
            break
        num_evaluated = sum(
            len(accelerator.gather_for_metrics(labels)) for _, labels in eval_loader
        )
        assert num_evaluated == 24
    assert pattern == [False, False, True, False]
    assert accelerator._clock.active is None
    with pytest.raises(ZeroDivisionError):
        fail(accelerator, model)
    assert accelerator._clock.active is None


def fail(accelerator: Accelerator, model: nn.Module) -> None:
    with accelerator.accumulate(model):
        raise ZeroDivisionError
