"""Tensor parallel trains like one plain process: alone and with every kind of data parallelism around it.

Tolerances with AdamW over 8 steps, two in each phase, or 20: float32 differs from plain torch by the order of sums only (1e-5 on a loss of 3);
bf16 keeps 8 bits of every product and the reference is float32 (5e-2).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten import Accelerator
from hasten.config.sections.parallel import ParallelismConfig, TorchTensorParallelConfig
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.testing.toys import TinyLM, next_token_loss, seeded
from tests.support.toys import TINY_LM_PLAN
from tests.support.training import Batch, Task, hasten_losses, plain_losses

STEPS = [8, pytest.param(20, marks=pytest.mark.exhaustive)]
VOCAB = 16


def batches(steps: int) -> list[Batch]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randint(0, VOCAB, (12, 6), generator=g),) for _ in range(steps)]


def loss_of(net: nn.Module, batch: Batch) -> Tensor:
    return next_token_loss(net(batch[0]), batch[0])


def task(tied: bool = False) -> Task:
    def build() -> TinyLM:
        return seeded(
            lambda: TinyLM(vocab=VOCAB, width=8, heads=4, depth=2, context=6, tied=tied)
        )

    return Task(build, batches, loss_of)


ON_FOUR: dict[str, dict[str, Any]] = {
    "pairs": {"tp_size": 2},
    "pairs in shards": {"tp_size": 2, "dp_shard_size": 2},
    "pairs in replicas": {"tp_size": 2, "dp_replicate_size": 2},
    "four": {"tp_size": 4},
}


def compare(
    sizes: dict[str, Any], plan: str, precision: str, steps: int, tolerance: float
) -> None:
    config = ParallelismConfig(
        **sizes, tp_plan="auto" if plan == "auto" else TINY_LM_PLAN
    )
    accelerator = Accelerator(mixed_precision=precision, parallelism_config=config)
    actual_losses = torch.tensor(
        hasten_losses(accelerator, task(plan == "tied"), steps)
    )
    expected = torch.tensor(plain_losses(task(plan == "tied"), steps))
    torch.testing.assert_close(actual_losses, expected, rtol=0, atol=tolerance)


@ranks(2)
@pytest.mark.parametrize(
    "plan", ["auto", "tied", pytest.param("full", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("steps", STEPS)
def test_tensor_parallel_trains_like_plain_torch(
    ctx: ProcessContext, plan: str, steps: int
) -> None:
    for precision, number, tolerance in (("no", steps, 1e-5), ("bf16", 4, 5e-2)):
        compare({"tp_size": 2}, plan, precision, number, tolerance)


@ranks(4)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            name, marks=() if name == "pairs in shards" else pytest.mark.exhaustive
        )
        for name in ON_FOUR
    ],
)
def test_tensor_parallel_beside_data_parallel_trains_like_plain_torch(
    ctx: ProcessContext, layout: str, steps: int
) -> None:
    for precision, number, tolerance in (("no", steps, 1e-5), ("bf16", 4, 5e-2)):
        # the plan that splits all the others do
        compare(ON_FOUR[layout], "tied", precision, number, tolerance)


@ranks(2)
@pytest.mark.parametrize(
    "tied", [True, pytest.param(False, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("steps", STEPS)
def test_divided_logits_train_like_plain_torch(
    ctx: ProcessContext, tied: bool, steps: int
) -> None:
    """The loss from parts of the vocabulary."""
    handler = TorchTensorParallelConfig(loss_parallel=True)
    for precision, number, tolerance in (("no", steps, 1e-5), ("bf16", 4, 5e-2)):
        config = ParallelismConfig(tp_size=2, tp_plan=TINY_LM_PLAN, tp_handler=handler)
        accelerator = Accelerator(mixed_precision=precision, parallelism_config=config)
        actual_losses = hasten_losses(accelerator, task(tied), number)
        assert actual_losses == pytest.approx(
            plain_losses(task(tied), number), abs=tolerance
        ), precision


@ranks(4)
@pytest.mark.exhaustive
@pytest.mark.parametrize("around", ["dp_shard_size", "dp_replicate_size"])
def test_divided_logits_with_data_parallel_train_like_plain_torch(
    ctx: ProcessContext, around: str
) -> None:
    handler = TorchTensorParallelConfig(loss_parallel=True)
    sizes: dict[str, Any] = {around: 2}
    config = ParallelismConfig(
        tp_size=2, tp_plan=TINY_LM_PLAN, tp_handler=handler, **sizes
    )
    actual_losses = hasten_losses(Accelerator(parallelism_config=config), task(), 8)
    assert actual_losses == pytest.approx(plain_losses(task(), 8), abs=1e-5)
