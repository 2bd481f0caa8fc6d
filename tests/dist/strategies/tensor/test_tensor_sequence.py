"""Tokens divided between split layers, and logits kept apart for the loss: what they give, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hasten import Accelerator, TorchTensorParallelConfig
from hasten.config.sections.parallel import ParallelismConfig
from hasten.errors import ConfigError, StepError
from hasten.extensions.chunked_loss.cross_entropy import Head
from hasten.extensions.chunked_loss.logits import LazyLogits, LogitsSource
from hasten.runtime.context import ProcessContext
from hasten.strategies.tensor.ops import enter, gather
from hasten.testing.pool import ranks
from hasten.testing.toys import TinyLM, next_token_loss, seeded
from tests.support.toys import TINY_LM_PLAN

STEPS = 20
SEQUENCE = TorchTensorParallelConfig(sequence_parallel=True)
BOTH = TorchTensorParallelConfig(sequence_parallel=True, loss_parallel=True)


def made_for(handler: TorchTensorParallelConfig, **sizes: Any) -> Accelerator:
    config = ParallelismConfig(
        **{"tp_size": 2, "tp_plan": TINY_LM_PLAN, **sizes}, tp_handler=handler
    )
    return Accelerator(parallelism_config=config)


class Layer(nn.Module):
    """Self-attention, attention to a memory where there is one, and a perceptron, each behind a norm."""

    def __init__(self, crossing: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        names = ("q", "k", "v", "cq", "ck", "cv") if crossing else ("q", "k", "v")
        self.inner = nn.ModuleDict({name: nn.Linear(8, 8) for name in names})
        self.outer = nn.ModuleDict(
            {name: nn.Linear(8, 8) for name in ("o", *(("co",) if crossing else ()))}
        )
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def attend(self, x: Tensor, other: Tensor, kind: str) -> Tensor:
        q, k, v = (
            self.inner[kind + name](t).unflatten(-1, (-1, 2)).transpose(1, 2)
            for name, t in (("q", x), ("k", other), ("v", other))
        )
        mixed: Tensor = self.outer[kind + "o"](
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        )
        return mixed

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        h = self.norms[0](x)
        x = x + self.attend(h, h, "")
        if memory is not None:
            x = x + self.attend(self.norms[1](x), memory, "c")
        return x + self.down(F.relu(self.up(self.norms[2](x))))  # type: ignore[no-any-return]


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.encoder = nn.ModuleList(Layer(False) for _ in range(2))
        self.decoder = nn.ModuleList(Layer(True) for _ in range(2))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, x = self.embed(source), self.embed(target)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        out: Tensor = self.head(x)
        return out


@ranks(2)
def test_an_encoder_and_a_decoder_train_like_plain_torch(ctx: ProcessContext) -> None:
    def run(accelerator: Accelerator | None) -> list[float]:
        net: nn.Module = seeded(EncoderDecoder)
        optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2)
        if accelerator is not None:
            net, optimizer = accelerator.prepare(net, optimizer)
        g, seen = torch.Generator().manual_seed(2), []
        for _ in range(STEPS):
            source, target = (
                torch.randint(0, 16, (3, n), generator=g) for n in (12, 6)
            )
            loss = next_token_loss(net(source, target), target.roll(-1, 1))
            optimizer.zero_grad()
            loss.backward() if accelerator is None else accelerator.backward(loss)  # type: ignore[no-untyped-call]
            optimizer.step()
            seen.append(float(loss.detach()))
        return seen

    plan = {
        "*.inner.*": "colwise",
        "*.outer.*": "rowwise",
        "*.up": "colwise",
        "*.down": "rowwise",
    }
    # the norm of a memory that no encoder layer has takes no part in the loss
    plan["head"] = "colwise_gather_output"
    assert run(made_for(BOTH, tp_plan=plan)) == pytest.approx(run(None), abs=1e-5)


@ranks(2)
def test_each_rank_computes_its_tokens_and_its_part_of_the_vocabulary(
    ctx: ProcessContext,
) -> None:
    seen: list[torch.Size] = []
    net: nn.Module = TinyLM(vocab=16, width=8, heads=4, depth=2, context=6)
    net.blocks[0].norm1.register_forward_hook(  # type: ignore[union-attr, index]
        lambda m, args, out: seen.append(out.shape)
    )
    net = made_for(BOTH).prepare(net)
    logits = net(torch.arange(12).view(2, 6))
    assert seen == [torch.Size([2, 3, 8])]
    assert isinstance(logits, LazyLogits)
    assert logits.shape == (2, 6, 16)
    assert logits.head.weight.shape == (8, 8)
    assert isinstance(logits[:, :-1].flatten(0, 1).float(), LazyLogits)


def split_logits(logits: Tensor, group: Any) -> LazyLogits:
    """Logits of a head that returns its input, split over two ranks."""
    head = Head(torch.eye(8).chunk(2)[group.rank()], None, group, 8, torch.float32)
    return LazyLogits.of(
        enter(logits, group),
        head,
        LogitsSource(finish=lambda part: gather(part, -1, group)),
    )


@ranks(2)
def test_parts_of_logits_give_what_whole_logits_give(ctx: ProcessContext) -> None:
    g = torch.Generator().manual_seed(0)
    whole = torch.randn(2, 6, 8, generator=g)
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

    for index in range(len(values(whole))):
        leaf = whole.clone().requires_grad_()
        expected = values(leaf)[index]
        expected.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        hidden = whole.clone().requires_grad_()
        got = values(split_logits(hidden, group))[index]
        got.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.testing.assert_close(torch.as_tensor(got.detach()), expected.detach())
        torch.testing.assert_close(hidden.grad, leaf.grad)
    logits = split_logits(whole, group)
    assert torch.equal(logits.argmax(-1), whole.argmax(-1))
    assert (logits.ndim, len(logits), logits.numel(), logits.dtype) == (
        3,
        2,
        96,
        torch.float32,
    )


@ranks(2)
def test_dropout_of_divided_tokens_differs_between_ranks_and_is_equal_outside(
    ctx: ProcessContext,
) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.up, self.down = (
                nn.Dropout(0.5),
                nn.Linear(4, 8),
                nn.Linear(8, 4),
            )
            self.kept: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            x = self.drop(x)
            self.kept.append(x.detach() != 0)
            out: Tensor = self.drop(self.down(self.up(x)))
            return out

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Noisy() for _ in range(2))
            self.after = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.after(torch.ones_like(x))  # type: ignore[no-any-return]

    accelerator = made_for(SEQUENCE, tp_plan={"*.up": "colwise", "*.down": "rowwise"})
    net = accelerator.prepare(Net())
    torch.manual_seed(0)
    outside = [
        accelerator.ctx.world.all_gather_object(net(torch.ones(2, 64, 4)).detach())
        for _ in range(2)
    ]
    assert torch.equal(outside[0][0], outside[0][1])
    assert not torch.equal(outside[0][0], outside[1][0])
    kept = accelerator.ctx.world.all_gather_object(
        net.layers[0].kept[0].to(torch.uint8)
    )
    assert not torch.equal(kept[0], kept[1])


class Measured(nn.Module):
    """A block that takes the number of tokens from its hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).view(x.shape[0], x.shape[1], -1))  # type: ignore[no-any-return]


@ranks(2)
def test_what_cannot_be_divided_is_refused(ctx: ProcessContext) -> None:
    def net() -> nn.Module:
        return TinyLM(vocab=16, width=8, heads=4, depth=2, context=6)

    attention = {
        name: style
        for name, style in TINY_LM_PLAN.items()
        if "up" not in name and "down" not in name
    }
    with pytest.raises(
        ConfigError, match=r"'blocks.0.up' \(Linear\) in a block is whole; only norms"
    ):
        made_for(SEQUENCE, tp_plan=attention).prepare(net())
    with pytest.raises(ConfigError, match="no list of repeated blocks"):
        made_for(SEQUENCE, tp_plan={"0": "colwise", "1": "rowwise"}).prepare(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        )
    with pytest.raises(
        ConfigError, match="gathers the output of no layer; name the one head"
    ):
        made_for(BOTH, tp_plan="auto").prepare(net())
    with pytest.raises(
        ConfigError, match=r"does not divide the 5 tokens .* Pad sequences to 6"
    ):
        made_for(SEQUENCE).prepare(net())(torch.zeros(1, 5, dtype=torch.long))
    stack = nn.Sequential(nn.Sequential(Measured(), Measured()))
    with pytest.raises(
        StepError,
        match=r"got 8 features instead of 4: .* Take the number of tokens from a projection",
    ):
        made_for(SEQUENCE, tp_plan={"*.up": "colwise", "*.down": "rowwise"}).prepare(
            stack
        )(torch.zeros(1, 4, 4))
    with pytest.raises(
        ConfigError, match="compiling their communication has not been tested"
    ):
        Accelerator(
            parallelism_config=ParallelismConfig(tp_size=2, tp_handler=SEQUENCE),
            dynamo_backend="eager",
        )
