"""Context parallelism on models people have: transformers' Llama and BERT unchanged, loaders, metrics, recomputation."""

from __future__ import annotations

from typing import Any, Final, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hasten import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    TorchContextParallelConfig,
)
from hasten.config.sections.parallel import ParallelismConfig
from hasten.errors import StepError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.testing.toys import TinyLM, next_token_loss, seeded
from tests.support.toys import Numbers

PRELOAD: Final = ("transformers.modeling_utils",)

CommStrategy = Literal["allgather", "ulysses"]
SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 16,
    "max_position_embeddings": 16,
}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    build: Any = LlamaForCausalLM
    net: nn.Module = build(LlamaConfig(**SIZES, num_key_value_heads=2))
    return net


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    build: Any = BertForMaskedLM
    net: nn.Module = build(
        BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )
    return net


def spread(comm_strategy: CommStrategy, size: int = 2, **settings: Any) -> Accelerator:
    handler = TorchContextParallelConfig(cp_comm_strategy=comm_strategy)
    return Accelerator(
        parallelism_config=ParallelismConfig(cp_size=size, cp_handler=handler),
        **settings,
    )


def llama_batch(g: torch.Generator, cache: bool) -> dict[str, Any]:
    tokens = torch.randint(1, 16, (3, 9), generator=g)
    labels = tokens[:, 1:].clone()
    labels[0, 3:] = -100
    positions = torch.arange(8).repeat(3, 1)
    return {
        "input_ids": tokens[:, :-1].clone(),
        "position_ids": positions,
        "shift_labels": labels,
        "use_cache": cache,
    }


def bert_batch(g: torch.Generator, cache: bool) -> dict[str, Any]:
    tokens, keep = (
        torch.randint(1, 16, (3, 8), generator=g),
        torch.ones(3, 8, dtype=torch.long),
    )
    keep[0, 5:] = 0
    labels = tokens.masked_fill(keep == 0, -100)
    positions = torch.arange(8).repeat(3, 1)
    return {
        "input_ids": tokens,
        "position_ids": positions,
        "attention_mask": keep,
        "labels": labels,
    }


def losses(
    build: Any, batch_of: Any, accelerator: Accelerator | None, cache: bool
) -> list[float]:
    net: nn.Module = seeded(build)
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2)
    if accelerator is not None:
        net, optimizer = accelerator.prepare(net, optimizer)
    g, step_losses = torch.Generator().manual_seed(3), []
    for _ in range(6):
        batch = batch_of(g, cache)
        if "shift_labels" in batch:
            batch["labels"] = batch["shift_labels"]
        if accelerator is None:
            loss = net(**batch).loss
            loss.backward()
        else:
            tensors = [t for t in batch.values() if isinstance(t, Tensor)]
            real = (batch["labels"] != -100).sum()
            with accelerator.context_parallel(tensors, [1] * len(tensors)):
                loss = net(**batch).loss
                accelerator.backward(loss)
                local_loss = loss.detach() * (batch["labels"] != -100).sum() / real
            loss = accelerator.reduce(local_loss, "sum")
        optimizer.step()
        optimizer.zero_grad()
        step_losses.append(float(loss.detach()))
    return step_losses


@ranks(2)
@pytest.mark.parametrize(
    ("name", "comm_strategy"),
    [
        ("llama", "allgather"),
        ("llama", "ulysses"),
        ("bert", "allgather"),
        ("bert", "ulysses"),
    ],
)
def test_models_of_transformers_train_unchanged(
    ctx: ProcessContext, name: str, comm_strategy: CommStrategy
) -> None:
    build, batch_of = {"llama": (llama, llama_batch), "bert": (bert, bert_batch)}[name]
    for cache in (False, True) if name == "llama" else (False,):
        expected = losses(build, batch_of, None, cache)
        assert losses(build, batch_of, spread(comm_strategy), cache) == pytest.approx(
            expected, abs=1e-5
        )


@ranks(2)
def test_hidden_padding_is_refused(ctx: ProcessContext) -> None:
    accelerator = spread("ulysses")
    net = accelerator.prepare(llama())
    tokens, positions = torch.ones(1, 8, dtype=torch.long), torch.arange(8).view(1, 8)
    for hidden in (slice(0, 3), slice(0, 1), slice(3, 5)):
        keep = torch.ones(1, 8, dtype=torch.long)
        keep[:, hidden] = 0
        block = accelerator.context_parallel([tokens, positions, keep], [1, 1, 1])
        with pytest.raises(StepError, match="Pad sequences on the right"), block:
            net(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=keep,
                use_cache=False,
            )


@ranks(2)
def test_ranks_of_one_sequence_read_the_same_samples_and_count_them_once(
    ctx: ProcessContext,
) -> None:
    accelerator = spread("allgather")
    loader = accelerator.prepare(DataLoader(Numbers(11), batch_size=4))
    gathered = torch.cat([accelerator.gather_for_metrics(batch) for batch in loader])
    assert gathered.tolist() == list(range(11))


@ranks(2)
@pytest.mark.parametrize("comm_strategy", ["allgather", "ulysses"])
def test_recomputed_activations_attend_over_ranks_too(
    ctx: ProcessContext, comm_strategy: CommStrategy
) -> None:
    fsdp = FullyShardedDataParallelPlugin(activation_checkpointing=True)
    grads = []
    for accelerator in (
        spread(comm_strategy),
        spread(comm_strategy, strategy="fsdp", fsdp_plugin=fsdp),
    ):
        net = accelerator.prepare(
            seeded(lambda: TinyLM(vocab=16, width=8, heads=4, depth=2, context=8))
        )
        tokens, positions = torch.arange(16).view(2, 8), torch.arange(8)
        with accelerator.context_parallel([tokens, positions], [1, 0]) as shards:
            logits = shards.gather(net(tokens, positions))
        del logits
        with accelerator.context_parallel([tokens, positions], [1, 0]):
            accelerator.backward(next_token_loss(net(tokens, positions), tokens))
        norm = accelerator.clip_grad_norm_(net.parameters(), 1e9)
        assert norm is not None
        grads.append(float(norm))
    assert grads[0] == pytest.approx(grads[1], rel=1e-5)


@ranks(2)
def test_a_loss_over_the_gathered_sequence_has_the_gradient_of_one_process(
    ctx: ProcessContext,
) -> None:
    """Pooling over all tokens, as classifiers do."""
    plain = seeded(lambda: TinyLM(vocab=16, width=8, heads=4, depth=2, context=8))
    tokens, positions = torch.arange(16).view(2, 8), torch.arange(8)
    loss = plain(tokens, positions).logsumexp((1, 2)).mean()
    loss.backward()
    accelerator = spread("allgather")
    net = accelerator.prepare(
        seeded(lambda: TinyLM(vocab=16, width=8, heads=4, depth=2, context=8))
    )
    with accelerator.context_parallel([tokens, positions], [1, 0]) as shards:
        pooled_loss = shards.gather(net(tokens, positions)).logsumexp((1, 2)).mean()
        accelerator.backward(pooled_loss)
    torch.testing.assert_close(pooled_loss, loss)
    for parameter, plain_parameter in zip(
        net.parameters(), plain.parameters(), strict=True
    ):
        torch.testing.assert_close(
            parameter.grad, plain_parameter.grad, rtol=1e-5, atol=1e-6
        )
