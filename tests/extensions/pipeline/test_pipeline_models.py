"""Pipelines of models people have: transformers' Llama, GPT-2 and BERT unchanged, evaluation, export, dropout, refusals."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hasten import Accelerator, ParallelismConfig, PipelineParallelConfig
from hasten.errors import ConfigError, PeerFailedError, PrepareError, StepError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.testing.toys import Block, TinyLM, next_token_loss, seeded
from tests.support.toys import Classifier, Sequences

PRELOAD: Final = ("transformers.modeling_utils",)

VOCAB = 16
PP2 = ParallelismConfig(pp_size=2)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    build: Any = LlamaForCausalLM
    config = LlamaConfig(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=16,
        tie_word_embeddings=True,
    )
    net: nn.Module = build(config)
    return net


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    build: Any = GPT2LMHeadModel
    net: nn.Module = build(
        GPT2Config(
            n_embd=8,
            n_layer=3,
            n_head=2,
            vocab_size=VOCAB,
            n_positions=16,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    return net


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    build: Any = BertForMaskedLM
    net: nn.Module = build(
        BertConfig(
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=VOCAB,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    return net


def model_loss(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = net(**batch).loss
    return loss


def batches(steps: int) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, VOCAB, (8, 6), generator=g) for _ in range(steps)]
    mask = torch.ones(8, 6, dtype=torch.int64)
    return [{"input_ids": x, "labels": x, "attention_mask": mask} for x in drawn]


@ranks(2)
@pytest.mark.parametrize("build", [llama, gpt2, bert], ids=lambda f: str(f.__name__))
def test_models_of_transformers_train_unchanged(
    ctx: ProcessContext, build: Any
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = seeded(build)
        net: nn.Module = seeded(build)
    inner = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    accelerator = Accelerator(parallelism_config=PP2)
    net, optimizer = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=1e-2)
    )
    for batch in batches(4):
        expected = model_loss(plain, batch)
        expected.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        inner.step()
        inner.zero_grad()
        loss = accelerator.forward_backward(net, batch, model_loss)
        accelerator.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-5)
    with torch.no_grad():
        outputs, plain_outputs = net(**batches(1)[0]), plain(**batches(1)[0])
    assert type(outputs) is type(plain_outputs)
    torch.testing.assert_close(outputs.logits, plain_outputs.logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(outputs.loss, plain_outputs.loss, rtol=0, atol=1e-4)


def lm(**sizes: Any) -> TinyLM:
    return seeded(
        lambda: TinyLM(vocab=VOCAB, width=8, heads=2, depth=4, context=6, **sizes)
    )


def lm_loss(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return next_token_loss(net(batch["tokens"]), batch["labels"])


@ranks(2, exhaustive=(4,))
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv_zero_bubble"])
def test_a_call_without_gradients_runs_through_the_pipeline(
    ctx: ProcessContext, schedule: Any
) -> None:
    """Batches of any size, also smaller than the number of micro-batches; the output is on every rank."""
    # their eight stages would need eight blocks
    if ctx.world.size == 4 and schedule != "1f1b":
        return
    handler = PipelineParallelConfig(schedule=schedule)
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(pp_size=-1, pp_handler=handler)
    )
    plain = lm()
    net = accelerator.prepare_model(lm(), evaluation_mode=True)
    for rows in (8, 5, 1):
        tokens = torch.arange(rows * 6).reshape(rows, 6) % VOCAB
        with torch.no_grad():
            torch.testing.assert_close(net(tokens), plain(tokens), rtol=0, atol=1e-5)


@ranks(2)
def test_loaders_metrics_and_export(ctx: ProcessContext, tmp_path: Path) -> None:
    accelerator = Accelerator(parallelism_config=PP2)
    net: nn.Module = lm(tied=True)
    loader = DataLoader(Sequences(12, 6, VOCAB), batch_size=4)
    net, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), loader
    )
    num_samples = 0
    for batch in loader:
        accelerator.forward_backward(net, batch, lm_loss)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            num_samples += len(
                accelerator.gather_for_metrics(net(batch["tokens"]).argmax(-1))
            )
    assert num_samples == 12, "each sample once, although both ranks read it"
    accelerator.save_model(net, tmp_path / "whole")
    state = accelerator.get_state_dict(net)
    if ctx.is_main:
        fresh = lm(tied=True)
        fresh.load_state_dict(dict(state))
        assert state["head.weight"] is state["embed.weight"]
    ctx.world.barrier("exported")
    saved_weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    accelerator.load_model(net, tmp_path / "whole")
    assert all(
        torch.equal(p, saved_weights[name]) for name, p in net.named_parameters()
    )


@ranks(2)
def test_stages_hold_only_their_own(ctx: ProcessContext) -> None:
    accelerator = Accelerator(parallelism_config=PP2)
    net: nn.Module = lm()
    everything = dict(net.named_parameters())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net, optimizer = accelerator.prepare(net, optimizer)
    stage_names = [name for name, _ in net.named_parameters()]
    everyone = ctx.world.all_gather_object(stage_names)
    assert sorted(name for names in everyone for name in names) == sorted(everything)
    assert {id(p) for p in net.parameters()} == {
        id(p) for group in optimizer.param_groups for p in group["params"]
    }
    assert ("embed.weight" in stage_names) is ctx.is_main


class Noisy(TinyLM):
    """A TinyLM whose blocks are followed by dropout."""

    def __init__(self) -> None:
        super().__init__(vocab=VOCAB, width=8, heads=2, depth=0, context=6)
        self.blocks = nn.ModuleList(
            nn.Sequential(Block(8, 2), nn.Dropout(0.5)) for _ in range(2)
        )


@ranks(2)
def test_stages_draw_different_dropout_and_keep_the_stream_common(
    ctx: ProcessContext,
) -> None:
    accelerator = Accelerator(parallelism_config=PP2)
    net = accelerator.prepare_model(seeded(Noisy))
    masks = []
    blocks: Any = net.blocks
    for block in blocks:
        if isinstance(block, nn.Sequential):
            block[1].register_forward_hook(
                lambda m, a, out: masks.append((out == 0).float())
            )
    torch.manual_seed(3)
    accelerator.forward_backward(
        net,
        torch.zeros(2, 6, dtype=torch.int64),
        lambda net, x: next_token_loss(net(x), x),
    )
    drawn = ctx.world.all_gather(masks[-1])
    assert not torch.equal(drawn[0], drawn[1])
    common_draws = ctx.world.all_gather(torch.rand(4))
    assert torch.equal(common_draws[0], common_draws[1])


@ranks(2)
def test_backward_and_calls_with_gradients_are_refused(ctx: ProcessContext) -> None:
    accelerator = Accelerator(parallelism_config=PP2)
    net = accelerator.prepare_model(lm())
    tokens = torch.zeros(4, 6, dtype=torch.int64)
    with pytest.raises(StepError, match=r"forward_backward\(model, batch, loss_of\)"):
        net(tokens)
    with pytest.raises(StepError, match=r"accelerator.forward_backward"):
        accelerator.backward(torch.zeros((), requires_grad=True))
    with pytest.raises(ConfigError, match=r"a batch of 5 rows .* from \[1, 5\]"):
        accelerator.forward_backward(
            net, tokens[:1].expand(5, 6), lambda net, x: next_token_loss(net(x), x)
        )
    with pytest.raises((StepError, PeerFailedError), match="one loss per micro-batch"):
        accelerator.forward_backward(net, tokens, lambda net, x: net(x))
    with pytest.raises((ZeroDivisionError, PeerFailedError), match="division"):
        accelerator.forward_backward(net, tokens[:2], lambda net, x: net(x) * (1 // 0))


@ranks(2)
def test_models_that_cannot_be_cut_are_refused(ctx: ProcessContext) -> None:
    accelerator = Accelerator(parallelism_config=PP2)
    with pytest.raises(PrepareError, match="no list of repeated blocks"):
        accelerator.prepare(Classifier())
    with pytest.raises(PrepareError, match="several lists of blocks"):
        accelerator.prepare(nn.ModuleDict({"a": lm(), "b": lm()}))
    split_config = PipelineParallelConfig(split_points=("blocks.0",))
    config = ParallelismConfig(pp_size=2, pp_handler=split_config)
    with pytest.raises(ConfigError, match="has 1 blocks, fewer than the 2 stages"):
        Accelerator(parallelism_config=config).prepare(TinyLM(depth=1))


class Residual(TinyLM):
    """A TinyLM that adds its embeddings to the output of its blocks: a way around the stages."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = start = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + start))  # type: ignore[no-any-return]


class Backwards(TinyLM):
    """A TinyLM that registers its head first."""

    def __init__(self) -> None:
        super().__init__(vocab=VOCAB, width=8, heads=2, depth=2, context=6)
        modules = dict(self._modules)
        self._modules.clear()
        self._modules.update(
            {
                name: modules[name]
                for name in ("head", "norm", "blocks", "embed", "position")
            }
        )


@ranks(2)
def test_values_that_pass_by_the_blocks_are_noticed(ctx: ProcessContext) -> None:
    accelerator = Accelerator(parallelism_config=PP2)
    tokens = torch.zeros(2, 6, dtype=torch.int64)

    def loss_of(net: nn.Module, x: Tensor) -> Tensor:
        return next_token_loss(net(x), x)

    net = accelerator.prepare_model(
        Residual(vocab=VOCAB, width=8, heads=2, depth=2, context=6)
    )
    with pytest.raises(
        (PrepareError, PeerFailedError),
        match="only the hidden state of the blocks is sent",
    ):
        accelerator.forward_backward(net, tokens, loss_of)
    net = accelerator.prepare_model(seeded(Backwards))
    with pytest.raises(
        (PrepareError, PeerFailedError), match=r"pp_handler.first_stage="
    ):
        accelerator.forward_backward(net, tokens, loss_of)
    sides = PipelineParallelConfig(
        first_stage=("embed", "position"), last_stage=("head", "norm")
    )
    named = Accelerator(
        parallelism_config=ParallelismConfig(pp_size=2, pp_handler=sides)
    )
    net = named.prepare_model(seeded(Backwards))
    loss = named.forward_backward(net, tokens, loss_of)
    torch.testing.assert_close(loss, loss_of(seeded(Backwards), tokens).detach())


@ranks(2)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dynamo_backend": "inductor"}, "torch's compiler does not support"),
        ({"mixed_precision": "fp8"}, "fp8"),
        ({"strategy": "none"}, "strategy='none' is not supported with pp_size=2"),
    ],
)
def test_settings_that_stages_would_ignore_are_refused(
    ctx: ProcessContext, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Accelerator(parallelism_config=PP2, **settings)
