"""The chunked loss on several ranks: a vocabulary sharded over them, and models that FSDP2 or tensor parallelism spreads.

Tolerances as in test_tensor_laws.py: float32 differs from plain torch by the order of sums only, bf16 keeps 8 bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from hasten import Accelerator
from hasten.config.sections.parallel import (
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchTensorParallelConfig,
)
from hasten.errors import ConfigError, StepError
from hasten.extensions.chunked_loss.cross_entropy import ChunkedCrossEntropyLoss
from hasten.extensions.chunked_loss.logits import LazyLogits, use_chunked_loss
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.testing.toys import TinyLM, next_token_loss, seeded
from tests.support.toys import TINY_LM_PLAN
from tests.support.training import Batch, Task, hasten_losses, plain_losses

VOCAB = 16


def batches(steps: int) -> list[Batch]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randint(0, VOCAB, (12, 6), generator=g),) for _ in range(steps)]


def task(chunked: bool, tied: bool = False) -> Task:
    def build() -> nn.Module:
        model = seeded(
            lambda: TinyLM(vocab=VOCAB, width=8, heads=4, depth=2, context=6, tied=tied)
        )
        if chunked:
            use_chunked_loss(model, "head", chunk_tokens=5)
        return model

    def loss_of(net: nn.Module, batch: Batch) -> Tensor:
        logits = net(batch[0])
        assert not chunked or isinstance(logits, LazyLogits)
        return next_token_loss(logits, batch[0])

    return Task(build, batches, loss_of)


@ranks(2)
def test_a_sharded_vocabulary_has_the_loss_and_gradients_of_the_whole(
    ctx: ProcessContext,
) -> None:
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for seed, (options, classes) in enumerate(
        (options, classes)
        for classes in (8, 11)  # divisible by the ranks, and not
        for options in (
            {},
            {"label_smoothing": 0.2, "ignore_index": 3},
            {"reduction": "sum", "label_smoothing": 1.0},
            {"reduction": "none", "ignore_index": 0},
        )
    ):
        g = torch.Generator().manual_seed(seed)
        hidden = torch.randn(
            3, 4, 6, generator=g, dtype=torch.float64, requires_grad=True
        )
        weight = torch.randn(
            classes, 6, generator=g, dtype=torch.float64, requires_grad=True
        )
        bias = torch.randn(
            classes, generator=g, dtype=torch.float64, requires_grad=True
        )
        target = torch.randint(0, classes, (3, 4), generator=g)
        target[0, 0] = 5
        loss_options: Any = options
        expected = F.cross_entropy(
            F.linear(hidden, weight, bias).flatten(0, 1),
            target.flatten(),
            **loss_options,
        )
        factor = torch.rand(expected.shape, generator=g, dtype=torch.float64)
        expected_grads = torch.autograd.grad(expected, [hidden, weight, bias], factor)

        shards = [
            distribute_tensor(x.detach(), mesh, [Shard(0)]).requires_grad_()
            for x in (weight, bias)
        ]
        replicated = (
            DTensor.from_local(hidden, mesh, [Replicate()]) if seed % 2 else hidden
        )
        actual_loss = ChunkedCrossEntropyLoss(chunk_tokens=5, **loss_options)(
            replicated, shards[0], target, shards[1]
        )
        torch.testing.assert_close(
            actual_loss.flatten(), expected.flatten(), rtol=0, atol=1e-12
        )
        grads: Any = torch.autograd.grad(
            actual_loss, [hidden, *shards], factor.view(actual_loss.shape)
        )
        for actual_grad, expected_grad in zip(
            [grads[0], *(x.full_tensor() for x in grads[1:])],
            expected_grads,
            strict=True,
        ):
            torch.testing.assert_close(actual_grad, expected_grad, rtol=0, atol=1e-12)


@ranks(2)
def test_a_weight_sharded_over_other_ranks_is_refused(ctx: ProcessContext) -> None:
    loss = ChunkedCrossEntropyLoss()
    hidden, target = torch.randn(4, 6), torch.zeros(4, dtype=torch.long)
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    with pytest.raises(
        ConfigError, match="compute the loss inside the model's forward"
    ):
        loss(hidden, distribute_tensor(torch.randn(8, 6), mesh, [Shard(0)]), target)
    with pytest.raises(ConfigError, match="give vocabulary_axis="):
        loss(hidden, distribute_tensor(torch.randn(8, 6), mesh, [Shard(1)]), target)
    named = ChunkedCrossEntropyLoss(vocabulary_axis="dp_shard")
    with pytest.raises(ConfigError, match="Shard the bias like the weight"):
        named(
            hidden,
            distribute_tensor(torch.randn(8, 6), mesh, [Shard(0)]),
            target,
            torch.zeros(8),
        )
    assert named(
        hidden, distribute_tensor(torch.zeros(8, 6), mesh, [Shard(0)]), target
    ) == pytest.approx(2.0794415)
    out_of_range = named(
        hidden, distribute_tensor(torch.zeros(8, 6), mesh, [Shard(0)]), target + 8
    )
    assert out_of_range.isnan()


LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {"dp_replicate_size": 2},
    "shards": {"dp_shard_size": 2},
    "shards of a vocabulary": {
        "tp_size": 2,
        "dp_shard_size": 2,
        "tp_plan": TINY_LM_PLAN,
    },
    "vocabulary": {"tp_size": 2, "tp_plan": TINY_LM_PLAN},
    "vocabulary in the loss": {
        "tp_size": 2,
        "tp_plan": TINY_LM_PLAN,
        "tp_handler": TorchTensorParallelConfig(loss_parallel=True),
    },
}


@ranks(2)
@pytest.mark.parametrize(
    "layout", [name for name in LAYOUTS if name != "shards of a vocabulary"]
)
def test_models_train_like_plain_torch(ctx: ProcessContext, layout: str) -> None:
    compare(layout)


@ranks(4)
def test_shards_of_a_split_vocabulary_train_like_plain_torch(
    ctx: ProcessContext,
) -> None:
    compare("shards of a vocabulary")


def compare(layout: str) -> None:
    """Compare the losses of a run with those of plain torch."""
    for tied in (False, True):
        for precision, number, tolerance in (("no", 8, 1e-5), ("bf16", 4, 5e-2)):
            accelerator = Accelerator(
                mixed_precision=precision,
                parallelism_config=ParallelismConfig(**LAYOUTS[layout]),
            )
            actual_losses = hasten_losses(accelerator, task(True, tied), number)
            assert actual_losses == pytest.approx(
                plain_losses(task(False, tied), number), abs=tolerance
            ), f"{tied} {precision}"


@ranks(2)
def test_logits_of_a_split_head_are_whole_where_they_are_used(
    ctx: ProcessContext,
) -> None:
    config = ParallelismConfig(tp_size=2, tp_plan=TINY_LM_PLAN)
    accelerator = Accelerator(parallelism_config=config)
    (tokens,) = batches(1)[0]
    plain = task(False).build()(tokens)
    net = accelerator.prepare(task(True).build())
    torch.testing.assert_close(net(tokens).argmax(-1), plain.argmax(-1))
    torch.testing.assert_close(net(tokens).detach(), plain.detach(), rtol=0, atol=1e-5)


@ranks(2)
def test_a_sharded_head_is_gathered_again_for_a_loss_outside_the_model(
    ctx: ProcessContext,
) -> None:
    """Alone in its shard group, too. Its logits are whole without gradients, and say why not where its weight was freed."""
    for policy in ("auto", lambda module: getattr(module, "out_features", 0) == VOCAB):
        config = ParallelismConfig(dp_shard_size=2)
        plugin = FullyShardedDataParallelPlugin(auto_wrap_policy=policy)
        accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=config)
        actual_losses = hasten_losses(accelerator, task(True), 8)
        assert actual_losses == pytest.approx(plain_losses(task(False), 8), abs=1e-5)
    (tokens,) = batches(1)[0]
    net = Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2)).prepare(
        task(True).build()
    )
    with pytest.raises(
        StepError,
        match=r"have been freed since the forward pass.*outputs.logits.detach",
    ):
        net(tokens).argmax(-1)
    with torch.no_grad():
        torch.testing.assert_close(
            net(tokens), task(False).build()(tokens), rtol=0, atol=1e-5
        )
