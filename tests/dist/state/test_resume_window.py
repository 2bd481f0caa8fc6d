"""A window in progress on another layout: its gradients are shared out exactly, or the load is refused unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hasten import Accelerator
from hasten.config.sections.parallel import FullyShardedDataParallelPlugin
from hasten.errors import CheckpointError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import Pool

EVERY = 3
MESHES: dict[str, dict[str, int]] = {"fsdp": {"dp_shard": -1}, "ddp": {}}
Layout = tuple[str, int]


def make(ctx: ProcessContext, folder: Path, strategy: str, precision: str = "no") -> tuple[Accelerator, Any, Any]:
    torch.manual_seed(5)
    settings: dict[str, Any] = {}
    if strategy == "fsdp":
        settings = {"strategy": "fsdp", "fsdp_plugin": FullyShardedDataParallelPlugin()}
    accelerator = Accelerator(
        context=ctx,
        project_dir=str(folder),
        gradient_accumulation_steps=EVERY,
        mixed_precision=precision,
        **settings,
    )
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))  # 5 and 1 rows: uneven and empty shards
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def micro_step(run: tuple[Accelerator, Any, Any], number: int, weighted: bool) -> None:
    """A micro-step whose data depend on its number and the rank."""
    accelerator, model, optimizer = run
    rank, size = accelerator.process_index, accelerator.num_processes
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(number))[rank * 12 // size : (rank + 1) * 12 // size]
    with accelerator.accumulate(model):
        loss = model(x).pow(2).mean()
        accelerator.backward(loss, weight=len(x) if weighted else None)
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        return torch.zeros(0)
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def mean_gradients(ctx: ProcessContext, model: nn.Module) -> list[Tensor]:
    """What an update would use if the window ended here; torch gives a rank with an empty shard no gradient."""
    found = [torch.zeros_like(p, requires_grad=False) if p.grad is None else p.grad for p in model.parameters()]
    return [whole(g) if isinstance(g, DTensor) else ctx.world.all_reduce(g, "mean") for g in found]


def begin(
    ctx: ProcessContext, folder: Path, strategy: str, steps: int, weighted: bool, precision: str = "no"
) -> list[Tensor]:
    """Some micro-steps, and a checkpoint in the middle of a window; the mean gradients of it."""
    run = make(ctx, folder, strategy, precision)
    for number in range(steps):
        micro_step(run, number, weighted)
    run[0].save_state()
    return mean_gradients(ctx, run[0].unwrap_model(run[1]))


def resume(
    ctx: ProcessContext, folder: Path, strategy: str, steps: int, until: int, weighted: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients right after loading, as a mean over ranks, and the weights at the end."""
    run = make(ctx, folder, strategy)
    run[0].load_state()
    inner = run[0].unwrap_model(run[1])
    after = mean_gradients(ctx, inner)
    for number in range(steps, until):
        micro_step(run, number, weighted)
    return after, [whole(p) for p in inner.parameters()]


def in_one_process(until: int) -> list[Tensor]:
    """Plain torch on the whole batch."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(until):
        x = torch.randn(12, 3, generator=torch.Generator().manual_seed(number))
        (model(x).pow(2).mean() / EVERY).backward()
        if number % EVERY == EVERY - 1:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


PAIRS: list[tuple[Layout, Layout]] = [
    (("fsdp", 4), ("fsdp", 2)),
    (("fsdp", 2), ("fsdp", 3)),
    (("fsdp", 1), ("fsdp", 4)),
    (("fsdp", 2), ("ddp", 2)),
    (("ddp", 2), ("fsdp", 2)),
    (("ddp", 3), ("fsdp", 2)),
    (("fsdp", 3), ("ddp", 1)),
    (("ddp", 1), ("fsdp", 1)),
    (("ddp", 4), ("ddp", 3)),
]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_a_window_goes_on_in_another_layout(
    rank_pool: Pool, tmp_path: Path, old: Layout, new: Layout, weighted: bool
) -> None:
    steps, until = 5, 9
    saved = rank_pool.run(begin, old[1], tmp_path, old[0], steps, weighted, mesh=MESHES[old[0]])
    loaded = rank_pool.run(resume, new[1], tmp_path, new[0], steps, until, weighted, mesh=MESHES[new[0]])
    share = old[1] / new[1] if weighted else 1.0  # a weighted window is divided by the number of ranks at its end
    exact = old[0] == new[0] == "fsdp" and not weighted
    for after, end in loaded:
        for a, b in zip(after, saved[0], strict=True):
            torch.testing.assert_close(a, b * share, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-7)
        for a, b in zip(end, in_one_process(until), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def refused(ctx: ProcessContext, folder: Path, strategy: str, precision: str) -> str:
    """The error of a load that changes nothing."""
    run = make(ctx, folder, strategy, precision)
    for number in range(7):
        micro_step(run, number, weighted=False)
    parameters = list(run[0].unwrap_model(run[1]).parameters())
    before = [(whole(p), whole(p.grad), whole(run[2].state[p]["momentum_buffer"])) for p in parameters]
    with pytest.raises(CheckpointError) as caught:
        run[0].load_state()
    after = [(whole(p), whole(p.grad), whole(run[2].state[p]["momentum_buffer"])) for p in parameters]
    assert all(torch.equal(a, b) for x, y in zip(before, after, strict=True) for a, b in zip(x, y, strict=True))
    micro_step(run, 7, weighted=False)
    return str(caught.value)


def begin_replicated(ctx: ProcessContext, folder: Path) -> None:
    run = make(ctx, folder, "fsdp")
    for number in range(5):
        micro_step(run, number, weighted=False)
    run[0].save_state()


@pytest.mark.parametrize(("strategy", "size"), [("fsdp", 2), ("fsdp", 4), ("ddp", 4), ("ddp", 1)])
def test_half_reduced_gradients_are_refused_before_anything_changes(
    rank_pool: Pool, tmp_path: Path, strategy: str, size: int
) -> None:
    rank_pool.run(begin_replicated, 4, tmp_path, mesh={"dp_replicate": 2, "dp_shard": 2})
    told = rank_pool.run(refused, size, tmp_path, strategy, "no", mesh=MESHES[strategy])
    assert len(set(told)) == 1
    assert "shard and replicate" in told[0]
    assert "Nothing was loaded" in told[0]


def test_scaled_gradients_are_refused_by_a_run_without_a_scaler(rank_pool: Pool, tmp_path: Path) -> None:
    rank_pool.run(begin, 2, tmp_path, "ddp", 5, False, "fp16")
    told = rank_pool.run(refused, 2, tmp_path, "ddp", "no")
    assert "off by the scale" in told[0]
