"""A loop on hasten and plain DeepSpeed: equal bit for bit, with the norm of the gradients computed once in both."""

from __future__ import annotations

import math
import os
from typing import Any, Final
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from hasten import Accelerator
from hasten.extensions.deepspeed import engine as deepspeed_engine
from hasten.extensions.deepspeed import optimizer as deepspeed_optimizer
from hasten.extensions.deepspeed.engine import VERSIONS
from hasten.optional import available
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

PRELOAD: Final = ("deepspeed",)

pytestmark = pytest.mark.skipif(
    not available("deepspeed", VERSIONS),
    reason=f"deepspeed{VERSIONS} is not installed (pip install 'hasten[deepspeed]')",
)

CLIP: Final = 0.05
STEPS: Final = 5
NORMS: Final = (
    "get_grad_norm_direct",
    "complete_grad_norm_calculation_for_cpu_offload",
)
"""DeepSpeed's functions that compute the norm of one group of parameters."""


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 7), nn.Tanh(), nn.Linear(7, 1)
    )


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def zero(stage: int, offload: bool) -> dict[str, Any]:
    where = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    return {"stage": stage, "reduce_bucket_size": 1000, **where}


def single(norm: Any) -> float:  # Any: DeepSpeed's norm is a tensor or a number
    """Return a norm in single precision, as the loop gets it."""
    return float(torch.as_tensor(norm, dtype=torch.float32))


def counting(optimizer: Any, counts: list[str]) -> None:  # Any: DeepSpeed is untyped
    """Record every norm of a group that an optimizer of DeepSpeed computes."""
    for name in NORMS:
        if (compute := getattr(optimizer, name, None)) is not None:

            def counted(
                *args: Any, _name: str = name, _compute: Any = compute, **kwargs: Any
            ) -> Any:
                counts.append(_name)
                return _compute(*args, **kwargs)

            setattr(optimizer, name, counted)


def plain(
    ctx: ProcessContext, stage: int, half: bool, offload: bool
) -> tuple[list[float], list[float], int]:
    """Losses, norms and the number of computed norms of DeepSpeed without hasten."""
    deepspeed = deepspeed_engine.join_process_group(ctx)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": half},
        "gradient_clipping": CLIP,
        "zero_optimization": zero(stage, offload),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    rank_variables = {
        "LOCAL_RANK": str(ctx.rank),
        "RANK": str(ctx.rank),
        "WORLD_SIZE": str(ctx.world.size),
    }
    with mock.patch.dict(os.environ, rank_variables), deepspeed_engine.torchs_linear():
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
    counts: list[str] = []
    counting(engine.optimizer, counts)
    losses, norms = [], []
    for step in range(STEPS):
        x = batch(step, ctx.rank)
        loss = engine(x.bfloat16() if half else x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        norms.append(single(engine.get_global_grad_norm()))
    return losses, norms, len(counts)


def on_hasten(
    ctx: ProcessContext, stage: int, half: bool, offload: bool
) -> tuple[list[float], list[float], int]:
    """The same through the loop of any strategy."""
    accelerator = Accelerator(
        strategy="deepspeed",
        mixed_precision="bf16" if half else "no",
        deepspeed_plugin={"hf_ds_config": {"zero_optimization": zero(stage, offload)}},
    )
    model = net()
    model, optimizer = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=2e-2)
    )
    counts: list[str] = []
    counting(model.optimizer, counts)
    losses, norms = [], []
    for step in range(STEPS):
        loss = model(batch(step, ctx.rank)).square().mean()
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
        assert norm is not None
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        norms.append(float(norm))
    return losses, norms, len(counts)


@ranks(2, exhaustive=(1,))
@pytest.mark.parametrize("offload", [False, True], ids=["device", "offload"])
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_clipped_steps_are_those_of_plain_deepspeed(
    ctx: ProcessContext, stage: int, half: bool, offload: bool
) -> None:
    """Losses and norms are equal bit for bit, and each norm of a group is computed once a step, as plain DeepSpeed does."""
    losses, norms, counted = plain(ctx, stage, half, offload)
    with mock.patch.object(
        deepspeed_optimizer, "_local_norm", wraps=deepspeed_optimizer._local_norm
    ) as another:
        by_hasten = on_hasten(ctx, stage, half, offload)
    assert by_hasten[0] == losses
    assert by_hasten[1] == norms
    assert 0 < by_hasten[2] == counted
    assert not another.called


@ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_norm_that_was_computed_is_not_used_for_other_gradients(
    ctx: ProcessContext, stage: int
) -> None:
    """Gradients multiplied after clipping have another norm, and the next window computes its norm anew."""
    accelerator = Accelerator(
        strategy="deepspeed",
        deepspeed_plugin={"hf_ds_config": {"zero_optimization": zero(stage, False)}},
    )
    model = net()
    model, optimizer = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=2e-2)
    )
    norms = []
    for step in range(2):
        accelerator.backward(model(batch(step, ctx.rank)).square().mean())
        clipped_norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.optimizer.multiply_gradients(0.5)
        halved_norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
        assert clipped_norm is not None
        assert halved_norm is not None
        assert 0 < float(halved_norm) < float(clipped_norm)
        norms.append(float(clipped_norm))
        optimizer.step()
        optimizer.zero_grad()
        assert math.isclose(
            float(model.get_global_grad_norm()), float(halved_norm), rel_tol=1e-6
        )
    assert norms[0] != norms[1]
