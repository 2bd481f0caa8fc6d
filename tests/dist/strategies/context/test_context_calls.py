"""Models called in a context-parallel block as in a plain loop: without positions, with labels, with a padding mask.

Each case trains like plain torch in one process (float32: another order of sums, 1e-5 on a loss of 3), or is an error.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any, Final, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hasten import Accelerator, TorchContextParallelConfig
from hasten.config.sections.parallel import ParallelismConfig
from hasten.errors import StepError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.testing.toys import seeded

PRELOAD: Final = ("transformers.modeling_utils",)

CommStrategy = Literal["allgather", "ulysses"]
WAYS: tuple[CommStrategy, ...] = ("allgather", "ulysses")
VOCAB = 16
LENGTH = 16


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
    }
    build: Any = LlamaForCausalLM
    net: nn.Module = build(
        LlamaConfig(
            **sizes,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
        )
    )
    return net


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    build: Any = GPT2LMHeadModel
    off: dict[str, Any] = {
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "loss_type": "ForCausalLM",
    }
    net: nn.Module = build(
        GPT2Config(
            n_embd=8, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=LENGTH, **off
        )
    )
    return net


MODELS = {"llama": llama, "gpt2": gpt2}


def spread(comm_strategy: CommStrategy, size: int = 2, **settings: Any) -> Accelerator:
    handler = TorchContextParallelConfig(cp_comm_strategy=comm_strategy)
    return Accelerator(
        parallelism_config=ParallelismConfig(cp_size=size, cp_handler=handler),
        **settings,
    )


def batch(g: torch.Generator, kind: str) -> dict[str, Tensor]:
    """Tokens and labels, not shifted; `padded` has padding on the right, which `counted` labels take part in."""
    tokens = torch.randint(1, VOCAB, (3, LENGTH), generator=g)
    inputs = {"input_ids": tokens, "labels": tokens.clone()}
    if kind != "full":
        mask = torch.ones_like(tokens)
        for row, length in enumerate((5, LENGTH, 11)):
            mask[row, length:] = 0
        inputs["attention_mask"] = mask
        if kind == "padded":
            inputs["labels"] = tokens.masked_fill(mask == 0, -100)
    return inputs


def trained(
    name: str, accelerator: Accelerator | None, kind: str, steps: int = 3
) -> tuple[list[float], nn.Module]:
    net: nn.Module = seeded(MODELS[name])
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2)
    if accelerator is not None:
        net, optimizer = accelerator.prepare(net, optimizer)
    g, losses = torch.Generator().manual_seed(3), []
    for _ in range(steps):
        inputs = batch(g, kind)
        if accelerator is None:
            loss = net(**inputs).loss
            loss.backward()
        else:
            real = (inputs["labels"][:, 1:] != -100).sum()
            shifted = F.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
            with accelerator.context_parallel(
                list(inputs.values()), [1] * len(inputs)
            ) as shards:
                loss = net(**inputs).loss
                accelerator.backward(loss)
            num_local = (shifted[:, shards.positions(LENGTH)] != -100).sum()
            loss = accelerator.reduce(
                loss.detach().nan_to_num() * num_local / real, "sum"
            ) / (accelerator.num_processes // accelerator.ctx.mesh.cp)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, net if accelerator is None else accelerator.unwrap_model(net)


def same(accelerator: Accelerator, name: str, kind: str) -> None:
    expected, plain = trained(name, None, kind)
    actual_losses, net = trained(name, accelerator, kind)
    assert actual_losses == pytest.approx(expected, abs=1e-5)
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        full_parameter = a.full_tensor() if hasattr(a, "full_tensor") else a
        # AdamW divides by a gradient's size: one that is zero but for rounding (a key's bias) moves by up to the learning rate
        assert float((full_parameter - b).detach().abs().median()) < 1e-5


@ranks(2)
@pytest.mark.parametrize(
    ("name", "comm_strategy", "kind"),
    [
        ("gpt2", "allgather", "full"),
        ("llama", "ulysses", "padded"),
        ("gpt2", "ulysses", "counted"),
        ("llama", "allgather", "counted"),
    ],
)
def test_a_model_of_transformers_is_called_as_in_a_plain_loop(
    ctx: ProcessContext, name: str, comm_strategy: CommStrategy, kind: str
) -> None:
    same(spread(comm_strategy), name, kind)


@ranks(4, timeout_s=180)
@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_on_four_ranks_too(ctx: ProcessContext) -> None:
    same(spread("allgather", 4), "gpt2", "padded")
    same(spread("allgather", 2, strategy="fsdp"), "llama", "full")


@ranks(2, 4)
@pytest.mark.exhaustive
@pytest.mark.parametrize("comm_strategy", WAYS)
@pytest.mark.parametrize("name", list(MODELS))
def test_every_way_and_kind(
    ctx: ProcessContext, name: str, comm_strategy: CommStrategy
) -> None:
    for strategy in ("auto", "fsdp"):
        for kind in ("full", "padded", "counted"):
            if (comm_strategy, kind) != ("ring", "counted"):
                same(
                    spread(comm_strategy, ctx.world.size, strategy=strategy), name, kind
                )


@ranks(2)
def test_logits_without_positions_are_those_of_the_whole(ctx: ProcessContext) -> None:
    for name, build in MODELS.items():
        net: Any = seeded(build)
        tokens = torch.randint(
            1, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0)
        )
        expected = net(input_ids=tokens).logits.detach()
        accelerator = spread("allgather")
        net = accelerator.prepare(net)
        with accelerator.context_parallel([tokens], [1]) as shards:
            gathered_logits = shards.gather(net(tokens).logits).detach()
        torch.testing.assert_close(
            gathered_logits, expected, rtol=0, atol=1e-6, msg=name
        )


class Speller(nn.Module):
    """A language model as people write them, with positions that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.learned = nn.Embedding(VOCAB, 8), nn.Embedding(LENGTH, 8)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, VOCAB)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.learned(positions)
        q, k, v = (
            projection.unflatten(-1, (2, 4)).transpose(1, 2)
            for projection in self.qkv(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]  # a Linear


@ranks(2, 4)
def test_a_plain_module_trains_like_plain_torch(ctx: ProcessContext) -> None:
    plain = seeded(Speller)
    accelerator = spread("allgather", ctx.world.size)
    net = copy.deepcopy(plain)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    reference_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        tokens = torch.randint(
            VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(step)
        )
        inputs, labels, positions = (
            tokens[:, :-1].clone(),
            tokens[:, 1:].clone(),
            torch.arange(LENGTH),
        )
        F.cross_entropy(
            plain(inputs, positions).flatten(0, 1), labels.flatten()
        ).backward()  # type: ignore[no-untyped-call]
        reference_optimizer.step()
        reference_optimizer.zero_grad()
        with accelerator.context_parallel([inputs, labels, positions], [1, 1, 0]):
            accelerator.backward(
                F.cross_entropy(net(inputs, positions).flatten(0, 1), labels.flatten())
            )
        optimizer.step()
        optimizer.zero_grad()
    for a, b in zip(
        accelerator.unwrap_model(net).parameters(), plain.parameters(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@ranks(2)
def test_tokens_without_positions_are_refused(ctx: ProcessContext) -> None:
    accelerator = spread("allgather")
    net = accelerator.prepare(seeded(Speller))
    tokens = torch.randint(
        VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0)
    )
    with (
        pytest.raises(StepError, match=r"without positions.*Pass the positions"),
        accelerator.context_parallel([tokens], [1]),
    ):
        net(tokens)


class WithLoss(nn.Module):
    """A model that computes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Speller()

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            self.net(tokens, positions)[:, :-1].flatten(0, 1), targets[:, 1:].flatten()
        )


@ranks(2)
def test_labels_of_a_plain_module_are_refused(ctx: ProcessContext) -> None:
    tokens = torch.randint(
        VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0)
    )
    labels, positions = tokens.clone(), torch.arange(LENGTH).repeat(2, 1)
    accelerator = spread("allgather")
    net = accelerator.prepare(seeded(WithLoss))
    block = accelerator.context_parallel([tokens, labels, positions], [1, 1, 1])
    with (
        pytest.raises(
            StepError, match=r"called with 'targets'.*compute the loss from the logits"
        ),
        block,
    ):
        net(tokens, positions, labels)


@ranks(2)
def test_training_without_the_block_says_what_to_write(ctx: ProcessContext) -> None:
    accelerator = spread("allgather")
    net = accelerator.prepare(seeded(Speller))
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    with pytest.raises(
        StepError,
        match=r"outside accelerator.context_parallel\(\).*cp_size=2.*with accelerator",
    ):
        net(tokens)
    with torch.no_grad():
        assert net(tokens).shape == (2, LENGTH, VOCAB)
    assert net.eval()(tokens).shape == (2, LENGTH, VOCAB)
    linear = accelerator.unwrap_model(accelerator.prepare(nn.Linear(2, 2)))
    assert pickle.loads(pickle.dumps(linear))(torch.ones(1, 2)).shape == (1, 2)


@ranks(2)
def test_models_with_positions_of_their_own_kind_are_refused(
    ctx: ProcessContext,
) -> None:
    from transformers import RobertaConfig, RobertaForMaskedLM

    build: Any = RobertaForMaskedLM
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
    }
    accelerator = spread("allgather")
    net = accelerator.prepare(
        build(RobertaConfig(**sizes, num_attention_heads=2, vocab_size=VOCAB))
    )
    tokens = torch.full((2, LENGTH), 5)
    with (
        pytest.raises(StepError, match="padding_idx"),
        accelerator.context_parallel([tokens], [1]),
    ):
        net(input_ids=tokens)


@ranks(2)
def test_what_a_part_does_not_show_is_refused(ctx: ProcessContext) -> None:
    """A padding mask over whole sequences beside parts of them, and a window that is longer than a part."""
    accelerator = spread("allgather")
    inner: Any = llama()
    net = accelerator.prepare(inner)
    tokens, mask = torch.full((2, LENGTH), 5), torch.ones(2, LENGTH, dtype=torch.long)
    with (
        pytest.raises(StepError, match="Add it to the buffers"),
        accelerator.context_parallel([tokens], [1]),
    ):
        net(input_ids=tokens, attention_mask=mask)
    inner.config.sliding_window = LENGTH - 1
    with (
        pytest.raises(StepError, match="at most 15 tokens"),
        accelerator.context_parallel([tokens], [1]),
    ):
        net(input_ids=tokens)
