"""Expert parallelism on models people have, on uneven loads, on settings that cannot hold; what each rank holds."""

from __future__ import annotations

import itertools
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hasten import Accelerator, ParallelismConfig
from hasten.errors import ConfigError, PrepareError, StepError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.testing.toys import next_token_loss, seeded
from tests.support.toys import Experts, TinyMixture

PRELOAD: Final = ("transformers.modeling_utils",)

SIZES: Final = (
    *(
        ("hidden_size", 8),
        ("intermediate_size", 16),
        ("num_hidden_layers", 2),
        ("num_attention_heads", 2),
    ),
    *(("num_key_value_heads", 1), ("vocab_size", 16), ("max_position_embeddings", 16)),
)


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    build: Any = MixtralForCausalLM
    config: Any = MixtralConfig
    net: nn.Module = build(
        config(**dict(SIZES), num_local_experts=4, num_experts_per_tok=2)
    )
    return net


def qwen() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    build: Any = Qwen3MoeForCausalLM
    config: Any = Qwen3MoeConfig
    expert_sizes = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "head_dim": 4,
    }
    net: nn.Module = build(config(**dict(SIZES), **expert_sizes))
    return net


def train(
    net: nn.Module, batches: list[Tensor], accelerator: Accelerator | None
) -> list[float]:
    """The mean losses of all ranks, clipped at every other step."""
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True)
    if accelerator is not None:
        net, optimizer = accelerator.prepare(net, optimizer)
    losses = []
    for step, batch in enumerate(batches):
        rank_batch = (
            batch
            if accelerator is None
            else batch.chunk(accelerator.num_processes)[accelerator.process_index]
        )
        loss: Any = next_token_loss(net(rank_batch).logits, rank_batch)
        loss.backward() if accelerator is None else accelerator.backward(loss)
        if step % 2:
            clip: Any = (
                nn.utils.clip_grad_norm_
                if accelerator is None
                else accelerator.clip_grad_norm_
            )
            clip(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if accelerator is None:
        return losses
    return (
        torch.stack(accelerator.ctx.world.all_gather_object(torch.tensor(losses)))
        .mean(0)
        .tolist()
    )


@ranks(2)
@pytest.mark.parametrize("build", [mixtral, qwen])
def test_mixtures_of_transformers_train_unchanged(
    ctx: ProcessContext, build: Any
) -> None:
    g = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 16, (4, 6), generator=g) for _ in range(8)]
    config = ParallelismConfig(ep_size=2, dp_shard_size=2)
    actual_losses = train(
        seeded(build), batches, Accelerator(parallelism_config=config)
    )
    assert actual_losses == pytest.approx(train(seeded(build), batches, None), abs=1e-5)


class Told(nn.Module):
    """Experts whose tokens are told where to go."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.experts = Experts(4, 4)

    def forward(self, x: Tensor, expert_ids: Tensor) -> Tensor:
        weights = (expert_ids + 1.0) / 5
        mixed: Tensor = self.experts(self.first(x), expert_ids, weights)
        return mixed


@ranks(2)
def test_any_load_has_the_gradients_of_one_process(ctx: ProcessContext) -> None:
    """Every choice of two tokens on each rank: also those that leave a rank, or an expert, without any."""
    accelerator = Accelerator(parallelism_config=ParallelismConfig(ep_size=2))
    net = accelerator.prepare(seeded(Told))
    plain = seeded(Told)
    loads = itertools.product(range(4), repeat=4)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))
    for load in itertools.islice(loads, 0, None, 5):
        expert_ids = torch.tensor(load).view(4, 1)
        plain.zero_grad()
        plain(x, expert_ids).pow(2).mean().backward()
        net.zero_grad()
        accelerator.backward(
            net(x.chunk(2)[ctx.rank], expert_ids.chunk(2)[ctx.rank]).pow(2).mean()
        )
        for (name, parameter), (_, plain_parameter) in zip(
            net.named_parameters(), plain.named_parameters(), strict=True
        ):
            grad = (
                parameter.grad.full_tensor()
                if isinstance(parameter.grad, DTensor)
                else parameter.grad
            )
            assert plain_parameter.grad is not None, f"{name}, {load}"
            assert grad is not None, f"{name}, {load}"
            torch.testing.assert_close(grad, plain_parameter.grad, rtol=0, atol=1e-6)


@ranks(2)
def test_each_rank_holds_its_experts_and_exports_all(ctx: ProcessContext) -> None:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(ep_size=2))
    net = accelerator.prepare(seeded(lambda: TinyMixture(experts=4)))
    expected = seeded(lambda: TinyMixture(experts=4)).state_dict()
    stack: Any = net.blocks[0].experts.up
    rank_experts = expected["blocks.0.experts.up"].chunk(2)[ctx.rank]
    assert torch.equal(stack.to_local(), rank_experts)
    full_state = accelerator.get_state_dict(net)
    if ctx.is_main:
        assert full_state.keys() == expected.keys()
        assert all(torch.equal(full_state[name], expected[name]) for name in expected)


class Listed(nn.Module):
    """Experts as a list of modules, which the block calls one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([expert(x) for expert in self.experts]).sum(0)


@ranks(2)
def test_what_cannot_be_divided_is_refused(ctx: ProcessContext) -> None:
    def prepared(net: nn.Module, **sizes: Any) -> nn.Module:
        model: nn.Module = Accelerator(
            parallelism_config=ParallelismConfig(ep_size=2, **sizes)
        ).prepare(net)
        return model

    with pytest.raises(
        PrepareError,
        match=r"no module of .* has experts that can be split.* or set ep_size=1",
    ):
        prepared(Listed())
    with pytest.raises(
        ConfigError,
        match=r"'experts' \(ModuleList\) cannot be split .*while the others wait",
    ):
        prepared(Listed(), ep_plan=("experts",))
    with pytest.raises(
        ConfigError,
        match=r"has 3 experts, which ep_size=2 does not divide.* one of \[1, 3\]",
    ):
        prepared(TinyMixture(experts=3))
    with pytest.raises(
        ConfigError,
        match=r"'nowhere' matches no module .*with experts are blocks.0.experts, blocks.1.experts",
    ):
        prepared(TinyMixture(), ep_plan=("nowhere",))
    with pytest.raises(ConfigError, match="its forward takes \\(input\\)"):
        prepared(nn.Sequential(nn.Linear(4, 4, bias=False)), ep_plan=("0",))
    tied = TinyMixture()
    tied.blocks[1].experts.up = tied.blocks[0].experts.up  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="one tied tensor"):
        prepared(tied)
    net: Any = prepared(TinyMixture())
    with pytest.raises(StepError, match=r"called with hidden states \(2, 3, 8\)"):
        net.blocks[0].experts(
            torch.zeros(2, 3, 8), torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1)
        )


@ranks(2)
def test_settings_that_cannot_hold_are_refused(ctx: ProcessContext) -> None:
    def refused(match: str, sizes: dict[str, Any], **settings: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            Accelerator(parallelism_config=ParallelismConfig(**sizes), **settings)

    refused(r"ep=3 does not fit .*Set ep_size to one of \[1, 2\]", {"ep_size": 3})
    refused("ep=2 was asked for with tp=2", {"ep_size": 2, "tp_size": 2})
    refused(
        "'inductor' is not supported with ep_size=2",
        {"ep_size": 2},
        dynamo_backend="inductor",
    )
    with pytest.raises(ConfigError, match="'fp8' has not been tested"):
        Accelerator(
            parallelism_config=ParallelismConfig(ep_size=2), mixed_precision="fp8"
        ).prepare(TinyMixture())
