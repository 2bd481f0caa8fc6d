"""Logits kept apart for the loss: what they give."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hasten import Accelerator, TorchTensorParallelConfig
from hasten.config.sections.parallel import ParallelismConfig
from hasten.extensions.chunked_loss.cross_entropy import Head
from hasten.extensions.chunked_loss.logits import LazyLogits, LogitsSource
from hasten.runtime.context import ProcessContext
from hasten.strategies.tensor.ops import enter_region, gather_output
from hasten.testing.pool import ranks
from hasten.testing.toys import TinyLM
from tests.support.toys import TINY_LM_PLAN


@ranks(2)
def test_each_rank_computes_its_part_of_the_vocabulary(ctx: ProcessContext) -> None:
    config = ParallelismConfig(
        tp_size=2,
        tp_plan=TINY_LM_PLAN,
        tp_handler=TorchTensorParallelConfig(loss_parallel=True),
    )
    net: nn.Module = TinyLM(vocab=16, width=8, heads=4, depth=2, context=6)
    net = Accelerator(parallelism_config=config).prepare(net)
    logits = net(torch.arange(12).view(2, 6))
    assert isinstance(logits, LazyLogits)
    assert logits.shape == (2, 6, 16)
    assert logits.head.weight.shape == (8, 8)
    assert isinstance(logits[:, :-1].flatten(0, 1).float(), LazyLogits)


def split_logits(logits: Tensor, group: Any) -> LazyLogits:
    """Logits of a head that returns its input, split over two ranks."""
    head = Head(torch.eye(8).chunk(2)[group.rank()], None, group, 8, torch.float32)
    return LazyLogits.of(
        enter_region(logits, group),
        head,
        LogitsSource(
            finish=lambda local_logits: gather_output(local_logits, -1, group)
        ),
    )


@ranks(2)
def test_parts_of_logits_give_what_whole_logits_give(ctx: ProcessContext) -> None:
    g = torch.Generator().manual_seed(0)
    full_logits = torch.randn(2, 6, 8, generator=g)
    target = torch.randint(0, 8, (2, 6), generator=g)
    target[0, :2] = -100
    group: Any = ctx.world.group  # type: ignore[attr-defined]  # a process group's
    soft = torch.softmax(torch.randn(12, 8, generator=g), -1)

    def values(x: Tensor) -> list[Tensor]:
        flat, labels = x.view(-1, x.size(-1)), target.view(-1)
        return [
            F.cross_entropy(flat, labels),
            F.cross_entropy(flat.float(), labels, reduction="sum"),
            F.cross_entropy(flat, labels, reduction="none", ignore_index=-100)
            .exp()
            .sum(),
            F.cross_entropy(flat, labels, label_smoothing=0.1),
            F.cross_entropy(flat, labels, weight=torch.arange(8.0) + 1),
            F.cross_entropy(flat, soft),
            F.cross_entropy(x.transpose(1, 2), target),
            F.cross_entropy(x[:, :-1].reshape(-1, 8), target[:, 1:].reshape(-1)),
            F.cross_entropy(x[target != -100], target[target != -100]),
            nn.CrossEntropyLoss()(input=flat, target=labels),
            (x.softmax(-1) * x).sum(),
            x[..., 3].sum() + x[..., :3].square().sum() + x.flatten().sum(),
            (2 * x + torch.ones(8)).logsumexp(-1).mean(),
            torch.cat([x, x]).max(),
        ]

    for index in range(len(values(full_logits))):
        leaf = full_logits.clone().requires_grad_()
        expected = values(leaf)[index]
        expected.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        hidden = full_logits.clone().requires_grad_()
        actual = values(split_logits(hidden, group))[index]
        actual.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.testing.assert_close(torch.as_tensor(actual.detach()), expected.detach())
        torch.testing.assert_close(hidden.grad, leaf.grad)
    logits = split_logits(full_logits, group)
    assert torch.equal(logits.argmax(-1), full_logits.argmax(-1))
    assert (logits.ndim, len(logits), logits.numel(), logits.dtype) == (
        3,
        2,
        96,
        torch.float32,
    )
