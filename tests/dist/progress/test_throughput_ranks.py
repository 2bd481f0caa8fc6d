"""Tokens of several ranks: those of one plain process, however the model is spread."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hasten import Accelerator
from hasten.config.sections.parallel import ParallelismConfig
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.testing.toys import TinyLM, next_token_loss, seeded
from tests.support.toys import TINY_LM_PLAN

VOCAB, CONTEXT, ROWS = 16, 6, 8


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return ROWS * 5

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "input_ids": torch.randint(
                0, VOCAB, (CONTEXT,), generator=torch.Generator().manual_seed(index)
            )
        }


def model() -> TinyLM:
    return seeded(
        lambda: TinyLM(vocab=VOCAB, width=8, heads=4, depth=2, context=CONTEXT)
    )


LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {"dp_replicate_size": 2},
    "shards": {"dp_shard_size": 2},
    "layers": {"tp_size": 2, "tp_plan": TINY_LM_PLAN},
    "stages": {"pp_size": 2},
}


@ranks(2)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_all_ranks_together_count_what_one_process_counts(
    ctx: ProcessContext, layout: str
) -> None:
    config = ParallelismConfig(**LAYOUTS[layout])
    accelerator = Accelerator(parallelism_config=config)
    net = model()
    readers = 2 if layout in ("replicas", "shards") else 1
    net, optimizer, loader = accelerator.prepare(
        net,
        torch.optim.SGD(net.parameters(), lr=1e-3),
        DataLoader(Texts(), batch_size=ROWS // readers),
    )
    throughput = accelerator.track_throughput(peak_tflops=1.0, flops_per_token=1.0)
    for batch in loader:
        if layout == "stages":
            accelerator.forward_backward(
                net,
                batch,
                lambda net, micro_batch: next_token_loss(
                    net(micro_batch["input_ids"]), micro_batch["input_ids"]
                ),
            )
        else:
            accelerator.backward(
                next_token_loss(net(batch["input_ids"]), batch["input_ids"])
            )
        optimizer.step()
        optimizer.zero_grad()
    assert throughput._tokens == 5 * ROWS * CONTEXT
    assert throughput.mfu is not None
    assert set(throughput.status()) == {"tokens_per_second", "mfu"}
