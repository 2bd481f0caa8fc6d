"""Tensor parallel trains like one plain process: alone and with every kind of data parallelism around it.

Tolerances with AdamW over 20 steps: float32 differs from plain torch by the order of sums only (1e-5 on a loss of 3);
bf16 keeps 8 bits of every product and the reference is float32 (5e-2).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten import Accelerator
from hasten.config.parallel import ParallelismConfig
from hasten.runtime.axes import BATCH
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.testing.toys import TinyLM, next_token_loss, seeded

STEPS = 20
VOCAB = 16
PHASES = ((1, False), (1, True), (3, False), (3, True))  # (accumulation, clipping)
FULL: dict[str, str] = {
    "embed": "embedding_rowwise",
    "blocks.*.[qkv]": "colwise",
    "blocks.*.o": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}


def model(tied: bool = False) -> TinyLM:
    return seeded(lambda: TinyLM(vocab=VOCAB, width=8, heads=4, depth=2, context=6, tied=tied))


def tokens(steps: int = STEPS) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (12, 6), generator=g) for _ in range(steps)]


def plain_losses(steps: int, tied: bool = False) -> list[float]:
    net = model(tied)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True)
    losses = []
    for step, batch in enumerate(tokens(steps)):
        loss = next_token_loss(net(batch), batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if PHASES[step * len(PHASES) // steps][1]:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def hasten_losses(accelerator: Accelerator, steps: int, tied: bool = False) -> list[float]:
    net = model(tied)
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True))
    mesh, losses = accelerator.ctx.mesh, []
    readers, reader = mesh.size(*BATCH), mesh.index(accelerator.process_index, *BATCH)
    for step, batch in enumerate(tokens(steps)):
        every, clips = PHASES[step * len(PHASES) // steps]
        accelerator.gradient_accumulation_steps = every
        total = torch.zeros(())
        for micro in batch.chunk(readers)[reader].chunk(every):
            with accelerator.accumulate(net):
                loss = next_token_loss(net(micro), micro)
                accelerator.backward(loss)
                if clips:
                    accelerator.clip_grad_norm_(net.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
                total += loss.detach() / every
        losses.append(float(total))
    return torch.stack(accelerator.comm.all_gather_object(torch.tensor(losses))).mean(0).tolist()


ON_FOUR: dict[str, dict[str, Any]] = {
    "pairs": {"tp_size": 2},
    "pairs in shards": {"tp_size": 2, "dp_shard_size": 2},
    "pairs in replicas": {"tp_size": 2, "dp_replicate_size": 2},
    "four": {"tp_size": 4},
}


def compare(sizes: dict[str, Any], plan: str, precision: str, steps: int, tolerance: float) -> None:
    config = ParallelismConfig(**sizes, tp_plan="auto" if plan == "auto" else FULL)
    accelerator = Accelerator(mixed_precision=precision, parallelism_config=config)
    got = torch.tensor(hasten_losses(accelerator, steps, plan == "tied"))
    expected = torch.tensor(plain_losses(steps, plan == "tied"))
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


@ranks(2)
@pytest.mark.parametrize("plan", ["auto", "full", "tied"])
def test_tensor_parallel_trains_like_plain_torch(ctx: ProcessContext, plan: str) -> None:
    for precision, steps, tolerance in (("no", STEPS, 1e-5), ("bf16", 4, 5e-2)):
        compare({"tp_size": 2}, plan, precision, steps, tolerance)


@ranks(4)
@pytest.mark.parametrize("layout", ON_FOUR)
def test_tensor_parallel_beside_data_parallel_trains_like_plain_torch(ctx: ProcessContext, layout: str) -> None:
    for precision, steps, tolerance in (("no", 12, 1e-5), ("bf16", 4, 5e-2)):  # three steps in each phase
        compare(ON_FOUR[layout], "tied", precision, steps, tolerance)  # the plan that splits all the others do
