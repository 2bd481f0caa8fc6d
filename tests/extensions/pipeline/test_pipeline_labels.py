"""Pipelines whose micro-batches have different numbers of labels: the loss and the update are those of the whole batch."""

from __future__ import annotations

import warnings
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hasten import Accelerator, ParallelismConfig, PipelineParallelConfig
from hasten.errors import PeerFailedError, StepError
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh_plan import BATCH
from hasten.testing.pool import ranks
from hasten.testing.toys import TinyLM, seeded

PRELOAD: Final = ("transformers.modeling_utils",)

VOCAB = 16
LENGTH = 6
Batch = dict[str, Tensor]


def batches(steps: int, rows: int = 8) -> list[Batch]:
    """Rows with one label to all of them; the first quarter has none at all in every other batch."""
    g = torch.Generator().manual_seed(1)
    padded_batches = []
    for step in range(steps):
        tokens = torch.randint(0, VOCAB, (rows, LENGTH), generator=g)
        labels = tokens.clone()
        for row in range(rows):
            labels[row, 2 + (row * 5 + step) % LENGTH :] = -100
        if step % 2:
            labels[: rows // 4] = -100
        padded_batches.append({"input_ids": tokens, "labels": labels})
    return padded_batches


def lm() -> TinyLM:
    return seeded(
        lambda: TinyLM(vocab=VOCAB, width=8, heads=2, depth=4, context=LENGTH)
    )


def lm_loss(net: nn.Module, batch: Batch) -> Tensor:
    logits = net(batch["input_ids"])[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def count(batch: Batch) -> Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


def trained(
    accelerator: Accelerator | None, loss_of: Any, steps: int, **weight: Any
) -> tuple[list[float], nn.Module]:
    net: Any = lm()
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if accelerator is not None:
        net, optimizer = accelerator.prepare(net, optimizer)
    losses = []
    for batch in batches(steps):
        if accelerator is None:
            loss = loss_of(net, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        else:
            mesh = accelerator.ctx.mesh
            reader = mesh.index(accelerator.process_index, *BATCH)
            reader_batch = {
                key: value.chunk(mesh.size(*BATCH))[reader]
                for key, value in batch.items()
            }
            loss = accelerator.forward_backward(net, reader_batch, loss_of, **weight)
            accelerator.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, net


def compare(
    accelerator: Accelerator,
    loss_of: Any,
    steps: int,
    losses: bool = True,
    **weight: Any,
) -> None:
    expected, plain = trained(None, loss_of, steps)
    actual_losses, net = trained(accelerator, loss_of, steps, **weight)
    if losses:
        assert actual_losses == pytest.approx(expected, abs=1e-5)
    full_state = accelerator.get_state_dict(net)
    if accelerator.is_main_process:
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(
                full_state[name], value, rtol=0, atol=1e-5, msg=name
            )


def pipeline(**sizes: Any) -> Accelerator:
    handler = PipelineParallelConfig(
        **{
            key: sizes.pop(key)
            for key in ("schedule", "num_microbatches")
            if key in sizes
        }
    )
    return Accelerator(
        parallelism_config=ParallelismConfig(pp_size=2, pp_handler=handler, **sizes)
    )


SCHEDULES = (
    "1f1b",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "zbv_zero_bubble",
    "loop_bfs",
)


@ranks(2, exhaustive=(4,))
@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(s, marks=() if s == "gpipe" else pytest.mark.exhaustive)
        for s in SCHEDULES
    ],
)
def test_weights_count_over_micro_batches_and_ranks(
    ctx: ProcessContext, schedule: Any
) -> None:
    micro = 2 if ctx.world.size == 4 and schedule != "zbv_zero_bubble" else 4
    compare(
        pipeline(schedule=schedule, num_microbatches=micro),
        lm_loss,
        6,
        ctx.world.size == 2,
        weight=count,
    )


@ranks(4)
@pytest.mark.parametrize(
    "sizes", [{"dp_replicate_size": 2}, {"dp_shard_size": 2}], ids=["ddp", "fsdp"]
)
def test_weights_count_over_data_parallel_ranks(
    ctx: ProcessContext, sizes: dict[str, int]
) -> None:
    compare(
        pipeline(num_microbatches=2, **sizes), lm_loss, 4, losses=False, weight=count
    )


@ranks(2)
def test_without_a_pipeline_the_weight_is_that_of_backward(ctx: ProcessContext) -> None:
    compare(Accelerator(), lm_loss, 4, losses=False, weight=count)


@ranks(2)
def test_a_model_of_transformers_with_padded_labels_trains_as_in_plain_torch(
    ctx: ProcessContext,
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
    }
    build: Any = LlamaForCausalLM

    def make() -> nn.Module:
        llama: nn.Module = build(
            LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
        )
        return llama

    def loss_of(net: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = net(**batch).loss
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, net = seeded(make), seeded(make)
    plain_optimizer: Any = torch.optim.SGD(plain.parameters(), lr=0.5)
    accelerator = pipeline(num_microbatches=4)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
    for batch in batches(4):
        expected = loss_of(plain, batch)
        expected.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        loss = accelerator.forward_backward(net, batch, loss_of, weight=count)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-5)
    plain.eval(), net.eval()
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    generation: dict[str, Any] = {
        "max_new_tokens": 3,
        "do_sample": False,
        "pad_token_id": 0,
    }
    generated = net.generate(tokens, **generation)
    assert torch.equal(generated, plain.generate(tokens, **generation))  # type: ignore[operator]
    with pytest.raises(StepError, match=r"generate\(\.\.\., use_cache=False\)"):
        net.generate(tokens, use_cache=True, **generation)


@ranks(2)
def test_ignored_labels_ask_for_a_weight(ctx: ProcessContext) -> None:
    accelerator = pipeline(num_microbatches=4)
    net = accelerator.prepare(lm())
    with pytest.raises(StepError, match="weight=lambda batch"):
        accelerator.forward_backward(net, batches(1)[0], lm_loss)


@ranks(2)
def test_batch_norm_is_refused_in_training_only(ctx: ProcessContext) -> None:
    def make() -> nn.Module:
        return seeded(
            lambda: nn.Sequential(
                *(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(4))
            )
        )

    def loss_of(net: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = net(batch).pow(2).mean()
        return loss

    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    accelerator = pipeline()
    net = accelerator.prepare(make())
    with pytest.raises(
        (StepError, PeerFailedError),
        match="normalises by the mean and variance of its batch",
    ):
        accelerator.forward_backward(net, x, loss_of)
    single_batch_pipeline = pipeline(schedule="gpipe", num_microbatches=1)
    net, plain = single_batch_pipeline.prepare(make()), make()
    loss = single_batch_pipeline.forward_backward(net, x, loss_of)
    torch.testing.assert_close(loss, loss_of(plain, x).detach(), rtol=0, atol=1e-6)
