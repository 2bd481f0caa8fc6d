"""performance="auto" on several ranks: the same losses as without it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hasten import Accelerator, DistributedDataParallelKwargs
from hasten.runtime.context import ProcessContext
from hasten.strategies import choose
from hasten.strategies.compiling import is_compiled
from hasten.testing.pool import ranks


class Block(nn.Module):
    """A small residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(8),
            nn.Linear(8, 16),
            nn.Linear(16, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Run:
    """A training on batches that depend on their number and the rank alone."""

    def __init__(self, ctx: ProcessContext, performance: Any, **settings: Any) -> None:
        torch.manual_seed(0)
        self.ctx = ctx
        # the mesh of `ctx` has replicas only
        sharded = {"strategy", "fsdp_plugin"} & settings.keys()
        self.accelerator = Accelerator(
            context=None if sharded else ctx, performance=performance, **settings
        )
        net = nn.Sequential(
            nn.Linear(4, 8), nn.Sequential(Block(), Block()), nn.Linear(8, 3)
        )
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        self.model, self.optimizer = self.accelerator.prepare(net, optimizer)
        self.losses: list[float] = []

    def step(self, rows: int = 6) -> None:
        generator = torch.Generator().manual_seed(
            len(self.losses) * 100 + self.ctx.rank
        )
        x, y = (
            torch.randn(rows, 4, generator=generator),
            torch.randint(3, (rows,), generator=generator),
        )
        loss = F.cross_entropy(self.model(x), y)
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


@contextmanager
def said() -> Iterator[list[str]]:
    """What hasten logs inside the block."""
    log_lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            log_lines.append(record.getMessage())

    logger, handler = logging.getLogger("hasten"), Keep()
    previous_level = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    try:
        yield log_lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(previous_level)


@ranks(1, 2)
def test_losses_are_those_without_it(ctx: ProcessContext) -> None:
    runs = []
    for performance, num_lines in (
        ("off", 0),
        ({"compile": False}, 1),
        ({"buckets": False, "compile": False}, 0),
    ):
        with said() as lines:
            runs.append(Run(ctx, performance))
        bucket_lines = [line for line in lines if "buckets of 25 MiB" in line]
        assert len(bucket_lines) == (
            num_lines if ctx.is_main and ctx.world.size > 1 else 0
        )
    for run in runs:
        for _ in range(4):
            run.step()
    assert runs[0].losses == runs[1].losses == runs[2].losses


@ranks(2)
def test_buckets_are_chosen_unless_they_are_given(ctx: ProcessContext) -> None:
    with said() as lines:
        Run(ctx, {"compile": False})
    assert len([line for line in lines if "buckets of 25 MiB" in line]) == (
        1 if ctx.is_main else 0
    )
    with said() as lines:
        Run(
            ctx,
            {"compile": False},
            kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=7)],
        )
        Run(ctx, {"compile": False, "buckets": False})
    assert not [line for line in lines if "MiB" in line]


def num_compiled(model: nn.Module) -> int:
    """Return the number of compiled modules."""
    return sum(is_compiled(module) for module in model.modules())


@ranks(1)
def test_a_model_without_blocks_and_settings_of_ones_own_stay(
    ctx: ProcessContext,
) -> None:
    with said() as lines:
        accelerator = Accelerator(context=ctx, performance="auto")
        assert not num_compiled(accelerator.prepare(nn.Linear(2, 2)))
    assert [line for line in lines if "it has no repeated block" in line]
    user_compiled = Run(ctx, "auto", dynamo_plugin={"backend": "eager"})
    assert is_compiled(user_compiled.model)
    assert num_compiled(user_compiled.model) == 1, "whole"
    assert not num_compiled(Run(ctx, {"compile": False}).model)


@contextmanager
def backend_of_choice(backend: str) -> Iterator[None]:
    """Context manager in which `performance="auto"` compiles with another backend."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "BACKEND", backend)
        yield


def alike(ctx: ProcessContext, backend: str) -> None:
    """Train with compiled blocks and batches of two sizes, and compare the losses with those of an eager run."""
    with backend_of_choice(backend), said() as lines:
        compiled = Run(ctx, "auto")
    plain = Run(ctx, "off")
    assert num_compiled(compiled.model) == 2
    with said() as lines:
        for run in (compiled, plain):
            for rows in (6, 6, 5, 6, 5):
                run.step(rows)
    assert (
        len([line for line in lines if "compiled the 2 blocks of Sequential" in line])
        == ctx.is_main
    )
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-4)


# torch 2.13, while it traces
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@ranks(1, 2, timeout_s=100)
def test_compiled_blocks_train_alike(ctx: ProcessContext) -> None:
    """Equal except for rounding: both compute in float32, in another order."""
    alike(ctx, "aot_eager")


@pytest.mark.exhaustive
@pytest.mark.timeout(310)
# torch 2.13, while it traces
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@ranks(1, 2, timeout_s=300)
def test_blocks_of_generated_code_train_alike(ctx: ProcessContext) -> None:
    alike(ctx, "inductor")


def alike_when_sharded(
    ctx: ProcessContext, backend: str, precision: str, tolerance: float
) -> None:
    """Train sharded, with compiled blocks, and compare losses and weights with those of an eager run."""
    with backend_of_choice(backend), said() as lines:
        run = Run(ctx, "auto", strategy="fsdp", mixed_precision=precision)
        for _ in range(5):
            run.step()
    assert num_compiled(run.model) == 2
    assert (
        len([line for line in lines if "compiled the 2 blocks" in line]) == ctx.is_main
    ), lines
    plain = Run(ctx, "off", strategy="fsdp", mixed_precision=precision)
    for _ in run.losses:
        plain.step()
    assert run.losses == pytest.approx(plain.losses, rel=tolerance)
    for parameter, eager_parameter in zip(
        run.model.parameters(), plain.model.parameters(), strict=True
    ):
        torch.testing.assert_close(
            parameter.full_tensor(),
            eager_parameter.full_tensor(),
            rtol=0,
            atol=tolerance,
        )


# torch 2.13, while it traces
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@ranks(1, 2, timeout_s=100)
def test_sharded_blocks_are_compiled_and_train_alike(ctx: ProcessContext) -> None:
    """With a backend that runs torch's own kernels, in the same order: equal in float32 up to the sums of fused operations."""
    alike_when_sharded(ctx, "aot_eager", "no", 1e-5)
    alike_when_sharded(ctx, "aot_eager", "bf16", 1e-2)


@pytest.mark.exhaustive
@pytest.mark.timeout(310)
# torch 2.13, while it traces
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@ranks(1, 2, timeout_s=300)
def test_sharded_blocks_of_generated_code_train_alike(ctx: ProcessContext) -> None:
    alike_when_sharded(ctx, "inductor", "no", 1e-4)


@ranks(2)
def test_shards_that_were_not_tried_compiled_stay_eager_with_a_reason(
    ctx: ProcessContext,
) -> None:
    with said() as lines:
        run = Run(ctx, "auto", fsdp_plugin={"cpu_offload": True})
    assert not num_compiled(run.model)
    assert [line for line in lines if "shards and parameters in host memory" in line]
