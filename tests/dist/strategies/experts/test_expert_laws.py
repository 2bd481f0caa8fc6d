"""Expert parallel trains like one plain process: with copies, shards, or both of everything else around it.

Tolerances with AdamW over 8 steps, two in each phase, or 20: float32 differs from plain torch by the order of sums only (1e-5 on a loss of 3);
bf16 keeps 8 bits of every product and the reference is float32 (5e-2). A router chooses discretely: two experts whose scores
are as near to each other as the rounding would be exchanged. The seeds here have none in float32; in bf16 that is inside the
tolerance.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from hasten import Accelerator, ParallelismConfig
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.testing.toys import next_token_loss, seeded
from tests.support.toys import TinyMixture
from tests.support.training import Batch, Task, hasten_losses, plain_losses

VOCAB: Final = 16
PRECISIONS: Final = (("no", 20, 1e-5), ("bf16", 4, 5e-2))
SHORTER: Final = (("no", 8, 1e-5), ("bf16", 4, 5e-2))


def batches(steps: int) -> list[Batch]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randint(0, VOCAB, (12, 6), generator=g),) for _ in range(steps)]


def loss_of(net: nn.Module, batch: Batch) -> Tensor:
    return next_token_loss(net(batch[0]), batch[0])


TASK: Final = Task(
    lambda: seeded(lambda: TinyMixture(vocab=VOCAB, width=8)), batches, loss_of
)


ON_TWO: Final = MappingProxyType[str, dict[str, Any]](
    {
        "copies of the rest": {"ep_size": 2},
        "shards of the rest": {"ep_size": 2, "dp_shard_size": 2},
    }
)
ON_FOUR: Final = MappingProxyType[str, dict[str, Any]](
    {
        "four": {"ep_size": 4},
        "four in shards": {"ep_size": 4, "dp_shard_size": 4},
        "pairs copied": {"ep_size": 2},
        "pairs sharded": {"ep_size": 2, "dp_shard_size": 4},
        "pairs in hybrid shards": {
            "ep_size": 2,
            "dp_shard_size": 2,
            "dp_replicate_size": 2,
        },
        "four in hybrid shards": {
            "ep_size": 4,
            "dp_shard_size": 2,
            "dp_replicate_size": 2,
        },
    }
)


def compare(
    sizes: dict[str, Any], precision: str, steps: int, tolerance: float
) -> None:
    accelerator = Accelerator(
        mixed_precision=precision, parallelism_config=ParallelismConfig(**sizes)
    )
    assert hasten_losses(accelerator, TASK, steps) == pytest.approx(
        plain_losses(TASK, steps), abs=tolerance
    )


@ranks(2)
@pytest.mark.parametrize("layout", ON_TWO)
@pytest.mark.parametrize(
    "runs",
    [SHORTER, pytest.param(PRECISIONS, marks=pytest.mark.exhaustive)],
    ids=["8 steps", "20 steps"],
)
def test_divided_experts_train_like_plain_torch(
    ctx: ProcessContext, layout: str, runs: tuple[tuple[str, int, float], ...]
) -> None:
    for precision, steps, tolerance in runs:
        compare(ON_TWO[layout], precision, steps, tolerance)


@pytest.mark.exhaustive
@ranks(4)
@pytest.mark.parametrize("layout", ON_FOUR)
def test_divided_experts_in_larger_worlds_train_like_plain_torch(
    ctx: ProcessContext, layout: str
) -> None:
    for precision, steps, tolerance in PRECISIONS:
        compare(ON_FOUR[layout], precision, steps, tolerance)
