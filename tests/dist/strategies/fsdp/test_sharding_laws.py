"""Sharded data parallel trains like one plain process, for every layout, precision, accumulation and clipping.

One run of 20 steps goes through accumulation 1 and 3, each without and with clipping, against one plain process.
Tolerances with AdamW: float32 differs from plain torch by the order of sums only (1e-5 on a loss of 3). bf16 keeps 8
bits of every product, and the reference is float32: 5e-2 on the loss is what one such rounding per layer costs here;
layouts agree with each other far more closely.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from hasten import Accelerator
from hasten.config.sections.loop import TorchDynamoPlugin
from hasten.config.sections.parallel import (
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from hasten.errors import ConfigError, PrepareError, StepError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.testing.toys import TinyLM, next_token_loss, seeded
from tests.support.training import Batch, Task, hasten_losses, plain_losses

STEPS = 20
VOCAB = 16


def model() -> TinyLM:
    return seeded(lambda: TinyLM(vocab=VOCAB, width=8, heads=2, depth=2, context=6))


def tokens(steps: int = STEPS) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (12, 6), generator=g) for _ in range(steps)]


def loss_of(net: nn.Module, batch: Batch) -> Tensor:
    return next_token_loss(net(batch[0]), batch[0])


TASK = Task(model, lambda steps: [(batch,) for batch in tokens(steps)], loss_of)


def layout(kind: str, world: int) -> dict[str, Any]:
    match kind:
        case "ddp":
            return {"strategy": "ddp"}
        case "fsdp":
            return {"strategy": "fsdp"}
        case "hsdp":
            return {
                "parallelism_config": ParallelismConfig(
                    dp_replicate_size=2, dp_shard_size=world // 2
                ),
                "strategy": "fsdp",
            }
        case _:
            return {"fsdp_plugin": FullyShardedDataParallelPlugin(cpu_offload=True)}


@ranks(2, exhaustive=(1, 4))
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp", "offload"])
def test_every_layout_trains_like_plain_torch(ctx: ProcessContext, kind: str) -> None:
    if kind == "hsdp" and ctx.world.size == 1:
        return
    for precision, steps, tolerance in (("no", STEPS, 1e-5), ("bf16", 8, 5e-2)):
        accelerator = Accelerator(
            mixed_precision=precision, **layout(kind, ctx.world.size)
        )
        actual_losses = torch.tensor(hasten_losses(accelerator, TASK, steps))
        torch.testing.assert_close(
            actual_losses,
            torch.tensor(plain_losses(TASK, steps)),
            rtol=0,
            atol=tolerance,
        )


@ranks(2)
def test_two_models_with_two_optimizers(ctx: ProcessContext) -> None:
    """A GAN under FSDP2 takes the same steps as in plain torch."""

    def parts() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)
        ), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))

    def losses(accelerator: Accelerator | None) -> list[float]:
        g, d = parts()
        og, od = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (g, d))
        if accelerator is not None:
            g, d, og, od = accelerator.prepare(g, d, og, od)
        rng = torch.Generator().manual_seed(2)
        step_losses = []
        for _ in range(6):
            noise = torch.randn(4, 4, generator=rng)
            if accelerator is not None:
                noise = noise.chunk(2)[ctx.rank]
            for optimizer, sign in ((od, 1.0), (og, -1.0)):
                optimizer.zero_grad()
                loss = sign * d(g(noise)).mean()
                accelerator.backward(loss) if accelerator else loss.backward()
                optimizer.step()
            step_losses.append(
                float(
                    accelerator.reduce(loss.detach(), "mean")
                    if accelerator
                    else loss.detach()
                )
            )
        return step_losses

    torch.testing.assert_close(
        torch.tensor(losses(Accelerator(strategy="fsdp"))),
        torch.tensor(losses(None)),
        rtol=0,
        atol=1e-5,
    )


@ranks(2)
def test_optimizers_made_before_or_after_and_with_state(ctx: ProcessContext) -> None:
    accelerator = Accelerator(strategy="fsdp")
    net = model()
    first_optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    next_token_loss(net(tokens()[0]), tokens()[0]).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    first_optimizer.step()
    first_optimizer.zero_grad()
    moments = {
        name: first_optimizer.state[p]["exp_avg"].clone()
        for name, p in net.named_parameters()
    }
    sharded, rebound = accelerator.prepare(net, first_optimizer)
    assert FSDPModule in type(sharded).__mro__
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(
            rebound.state[parameter]["exp_avg"].full_tensor(), moments[name]
        )
    second_optimizer = accelerator.prepare(
        torch.optim.SGD(sharded.parameters(), lr=0.1)
    )
    accelerator.backward(next_token_loss(sharded(tokens()[0]), tokens()[0]))
    second_optimizer.step()
    assert all(
        isinstance(p, DTensor)
        for group in second_optimizer.param_groups
        for p in group["params"]
    )


@ranks(2)
def test_frozen_half_weights_stay_and_trainable_ones_get_masters(
    ctx: ProcessContext,
) -> None:
    accelerator = Accelerator(strategy="fsdp", mixed_precision="bf16")
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    net[0].requires_grad_(False)
    wrap = FullyShardedDataParallelPlugin(
        auto_wrap_policy=lambda module: isinstance(module, nn.Linear)
    )
    accelerator = Accelerator(fsdp_plugin=wrap, mixed_precision="bf16")
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net[1].parameters()))
    assert net[0].weight.dtype == torch.bfloat16
    assert net[1].weight.dtype == torch.float32
    out = net(torch.ones(2, 4))
    assert out.dtype == torch.float32
    accelerator.backward(out.sum())
    optimizer.step()
    assert net[0].weight.grad is None


@ranks(2)
def test_ties_policies_and_ignored_modules(ctx: ProcessContext) -> None:
    tied = model()
    tied.head.weight = tied.embed.weight
    expected = copy.deepcopy(tied)(tokens()[0])
    sharded = Accelerator(strategy="fsdp").prepare(tied)
    assert sharded.head.weight is sharded.embed.weight
    torch.testing.assert_close(sharded(tokens()[0]), expected)
    counts = {}
    plugins = {
        "no_wrap": FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap"),
        "auto": FullyShardedDataParallelPlugin(),
        "size_based_wrap": FullyShardedDataParallelPlugin(
            auto_wrap_policy="size_based_wrap", min_num_params=600
        ),
    }
    for policy, plugin in plugins.items():
        net = Accelerator(fsdp_plugin=plugin).prepare(model())
        counts[policy] = sum(isinstance(module, FSDPModule) for module in net.modules())
    assert counts["no_wrap"] == 1
    assert counts["auto"] == 3
    assert counts["size_based_wrap"] > 1
    misspelt = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=("Blok",))
    with pytest.raises(ConfigError, match="has no module of that class"):
        Accelerator(fsdp_plugin=misspelt).prepare(model())
    with pytest.raises(ConfigError, match="diverge"):
        Accelerator(
            fsdp_plugin=FullyShardedDataParallelPlugin(ignored_modules="embed")
        ).prepare(model())
    frozen = model()
    frozen.embed.requires_grad_(False)
    unsharded = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(ignored_modules="embed")
    ).prepare(frozen)
    assert not isinstance(unsharded.embed.weight, DTensor)


@ranks(2)
def test_recompute_compile_prefetch_and_methods(ctx: ProcessContext) -> None:
    def grads(**settings: Any) -> list[Tensor]:
        accelerator = Accelerator(**settings)
        net = accelerator.prepare(model())
        accelerator.backward(next_token_loss(net(tokens()[0]), tokens()[0]))
        return [p.grad.full_tensor() for p in net.parameters()]

    expected = grads(strategy="fsdp")
    plain = FullyShardedDataParallelPlugin
    variants: list[dict[str, Any]] = [
        {"fsdp_plugin": plain(activation_checkpointing=True)},
        {"fsdp_plugin": plain(reshard_after_forward=False)},
        {"fsdp_plugin": plain(forward_prefetch_depth=1, backward_prefetch_depth=1)},
        {
            "strategy": "fsdp",
            "dynamo_plugin": TorchDynamoPlugin(
                backend="eager", use_regional_compilation=True
            ),
        },
    ]
    # torch's compiler looks at the gradients of the tensors it traces, leaves or not, and torch warns about that
    warnings.filterwarnings(
        "ignore", "The .grad attribute of a Tensor that is not a leaf"
    )
    for settings in variants:
        for actual_grad, expected_grad in zip(grads(**settings), expected, strict=True):
            torch.testing.assert_close(actual_grad, expected_grad, rtol=0, atol=1e-6)


@ranks(2)
def test_full_state_and_what_cannot_be(ctx: ProcessContext) -> None:
    accelerator = Accelerator(strategy="fsdp")
    net = accelerator.prepare(model())
    full = accelerator.get_state_dict(net)
    assert bool(full) == (ctx.rank == 0)
    for name, value in full.items():
        assert torch.equal(value, model().state_dict()[name])
    with pytest.raises(StepError, match="even_batches=True"):
        accelerator.join_uneven_inputs([net]).__enter__()
    with pytest.raises(PrepareError, match="no method 'generat'"):
        accelerator.mark_forward_method(net, "generat")


@ranks(2)
def test_ranks_that_start_different_become_rank_0s_model(ctx: ProcessContext) -> None:
    torch.manual_seed(ctx.rank)
    net = nn.Linear(4, 4)
    torch.manual_seed(0)
    expected = nn.Linear(4, 4)
    sharded = Accelerator(strategy="fsdp").prepare(net)
    assert torch.equal(sharded.weight.full_tensor(), expected.weight)


@ranks(2)
def test_overflow_on_one_rank_skips_the_step_on_all(ctx: ProcessContext) -> None:
    accelerator = Accelerator(strategy="fsdp", mixed_precision="fp16")
    net = nn.Linear(4, 4)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    initial_weight = net.weight.full_tensor().clone()
    factor = float("inf") if ctx.rank == 1 else 1.0
    accelerator.backward(net(torch.ones(2, 4)).sum() * factor)
    optimizer.step()
    skipped = [accelerator.optimizer_step_was_skipped]
    assert torch.equal(net.weight.full_tensor(), initial_weight)
    optimizer.zero_grad()
    accelerator.backward(F.mse_loss(net(torch.ones(2, 4)), torch.zeros(2, 4)))
    optimizer.step()
    skipped.append(accelerator.optimizer_step_was_skipped)
    assert skipped == [True, False]
    assert not torch.equal(net.weight.full_tensor(), initial_weight)


@ranks(2)
def test_meta_models_are_filled_by_the_users_function(ctx: ProcessContext) -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def fill(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.5)

    sharded = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(param_init_fn=fill)
    ).prepare(net)
    assert torch.equal(sharded[0].weight.full_tensor(), torch.full((4, 4), 0.5))
    with torch.device("meta"):
        meta_layer = nn.Linear(4, 4)
    with pytest.raises(PrepareError, match="meta device"):
        Accelerator(strategy="ddp").prepare(meta_layer)
