"""Models of every kind under FSDP2: tied, frozen, scalar, uneven, built on one rank only, and those that cannot be."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from hasten import Accelerator
from hasten.config.sections.parallel import (
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from hasten.errors import (
    ConfigError,
    MismatchError,
    PeerFailedError,
    PrepareError,
    StepError,
)
from hasten.runtime.context import ProcessContext
from hasten.strategies.sharded_updates import ELEMENTWISE, update_own_shards
from hasten.testing.pool import ranks
from hasten.testing.toys import TinyLM, next_token_loss, seeded

VOCAB = 16
HALVES = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)


def model(tied: bool = False) -> TinyLM:
    return seeded(
        lambda: TinyLM(vocab=VOCAB, width=8, heads=2, depth=2, context=6, tied=tied)
    )


def tokens(step: int = 0) -> Tensor:
    return torch.randint(
        0, VOCAB, (12, 6), generator=torch.Generator().manual_seed(step)
    )


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def language_losses(
    net: nn.Module, accelerator: Accelerator | None = None, steps: int = 3
) -> Tensor:
    """The losses of a few steps on shares of the same batches; plain torch without an Accelerator."""
    optimizer: Optimizer = torch.optim.AdamW(
        [p for p in net.parameters() if p.requires_grad], lr=0.05
    )
    if accelerator is not None:
        net, optimizer = accelerator.prepare(net, optimizer)
    losses = []
    for step in range(steps):
        batch = tokens(step)
        if accelerator is not None:
            batch = batch.chunk(accelerator.num_processes)[accelerator.process_index]
        loss = next_token_loss(net(batch), batch)
        backward(loss, accelerator)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(
            accelerator.reduce(loss.detach(), "mean")
            if accelerator is not None
            else loss.detach()
        )
    return torch.stack(losses)


def backward(loss: Tensor, accelerator: Accelerator | None) -> None:
    if accelerator is not None:
        accelerator.backward(loss)
    else:
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def same(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=tolerance, check_dtype=False
    )


@ranks(2)
def test_ties_between_groups_hold(ctx: ProcessContext) -> None:
    """Blocks that share a weight, and an embedding and a head that a policy would shard apart."""

    def tied_blocks() -> nn.Module:
        net = model()
        net.get_submodule("blocks.1.q").weight = net.get_parameter("blocks.0.q.weight")
        return net

    same(
        language_losses(tied_blocks(), Accelerator(strategy="fsdp")),
        language_losses(tied_blocks()),
    )
    plugin = FullyShardedDataParallelPlugin(
        auto_wrap_policy=lambda m: isinstance(m, (nn.Embedding, nn.LayerNorm))
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    net = model(tied=True)
    same(language_losses(net, accelerator), language_losses(model(tied=True)))
    assert isinstance(net.position, FSDPModule)
    assert not isinstance(net.embed, FSDPModule)  # its weight is the head's too


@ranks(2)
def test_what_was_decided_is_said_once(ctx: ProcessContext) -> None:
    """On the main process: master weights, computing and reducing dtypes, and what was chosen for the user."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logger = logging.getLogger("hasten.strategies.fsdp.strategy")
    logger.setLevel(logging.INFO)
    logger.addHandler(Ear())
    plugin = FullyShardedDataParallelPlugin(
        auto_wrap_policy=lambda m: isinstance(m, nn.Embedding), cpu_offload=True
    )
    Accelerator(fsdp_plugin=plugin, mixed_precision="bf16").prepare(
        model(tied=True).bfloat16()
    )
    Accelerator(strategy="fsdp").prepare(Tempered().requires_grad_(False))
    assert heard == (
        [
            "1 of 2 blocks are not sharded separately, because they share 'head.weight' with another block: they are sharded with "
            "the enclosing group",
            "TinyLM is sharded over {'dp_shard': 2} in 2 groups: master weights float32 in host memory, computing in "
            "bfloat16, reducing in float32",
            "temperature cannot be sharded (no dimension) and are replicated on every rank",
            "Tempered is sharded over {'dp_shard': 2} in 1 groups: master weights none (frozen) on the device, computing "
            "in the same, reducing in the same",
        ]
        if ctx.rank == 0
        else []
    )


class Tempered(nn.Module):
    """A layer with a learned temperature: a parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.temperature  # type: ignore[no-any-return]


@ranks(2, exhaustive=(4,))
def test_scalars_stay_whole_and_are_averaged(ctx: ProcessContext) -> None:
    def path(accelerator: Accelerator | None) -> Tensor:
        net: nn.Module = seeded(Tempered)
        optimizer: Optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        if accelerator is not None:
            net, optimizer = accelerator.prepare(net, optimizer)
        temperatures = []
        for step in range(3):
            batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            if accelerator is not None:
                batch = batch.chunk(ctx.world.size)[ctx.rank]
            for micro in batch.chunk(2):
                with (
                    accelerator.accumulate(net)
                    if accelerator is not None
                    else nullcontext()
                ):
                    loss = net(micro).pow(2).mean()
                    backward(loss if accelerator is not None else loss / 2, accelerator)
                    if accelerator is not None:
                        accelerator.clip_grad_norm_(net.parameters(), 0.5)
                        optimizer.step()
                        optimizer.zero_grad()
            if accelerator is None:
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            temperatures.append(net.get_parameter("temperature").detach().clone())
        return torch.stack(temperatures)

    expected = path(None)
    same(path(Accelerator(strategy="fsdp", gradient_accumulation_steps=2)), expected)
    if ctx.world.size == 4:
        replicas = Accelerator(
            strategy="fsdp", gradient_accumulation_steps=2, parallelism_config=HALVES
        )
        same(path(replicas), expected)


class LoRA(nn.Module):
    """A frozen layer with a trainable low-rank addition."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(  # type: ignore[no-any-return]
            F.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype)
        )


def adapted(dtype: torch.dtype) -> nn.Module:
    def build() -> nn.Module:
        net = model().to(dtype).requires_grad_(False)
        for block in net.blocks:
            for name in ("q", "v"):
                base = block.get_submodule(name)
                assert isinstance(base, nn.Linear)
                block.add_module(name, LoRA(base))
        return net

    return seeded(build, 5)


@ranks(2)
def test_lora_in_one_group_with_frozen_weights(ctx: ProcessContext) -> None:
    """float32 exactly; on a bf16 base the adapters train in float32 and the loss differs by bf16's rounding."""
    same(
        language_losses(adapted(torch.float32), Accelerator(strategy="fsdp")),
        language_losses(adapted(torch.float32)),
    )
    for settings in (
        {"mixed_precision": "bf16"},
        {},
        {"fsdp_plugin": FullyShardedDataParallelPlugin(cpu_offload=True)},
    ):
        net = adapted(torch.bfloat16)
        actual_losses = language_losses(net, Accelerator(strategy="fsdp", **settings))
        same(actual_losses, language_losses(adapted(torch.bfloat16).float()), 5e-2)
        assert {(p.dtype, p.requires_grad) for p in net.parameters()} == {
            (torch.bfloat16, False),
            (torch.float32, True),
        }


@ranks(3)
def test_weights_on_rank_0_alone_reach_every_rank(ctx: ProcessContext) -> None:
    """The other ranks build on meta; buffers, also those that are not saved, come along; shards are uneven."""
    elsewhere = torch.device("meta") if ctx.rank else nullcontext()
    for offload in (False, True):
        with elsewhere:
            net = model(tied=True)
        if ctx.rank == 0:
            net = model(tied=True)
        plugin = FullyShardedDataParallelPlugin(
            cpu_ram_efficient_loading=True, cpu_offload=offload
        )
        same(
            language_losses(net, Accelerator(fsdp_plugin=plugin)),
            language_losses(model(tied=True)),
        )
    with elsewhere:
        normed = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
        normed.register_buffer("angles", torch.arange(3.0), persistent=False)
    if ctx.rank == 0:
        normed.get_buffer("1.running_var").fill_(7.0)
    sharded = Accelerator(strategy="fsdp").prepare(normed)
    assert torch.equal(sharded[1].running_var, torch.full((5,), 7.0))
    assert torch.equal(sharded.angles, torch.arange(3.0))
    assert bool(whole(sharded[0].weight).isfinite().all())


@ranks(2)
def test_meta_tensors_alone_are_emptied_and_show_it(ctx: ProcessContext) -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    net.register_buffer("angles", torch.arange(3.0), persistent=False)
    with torch.device("meta"):
        net[0] = nn.Linear(4, 4)
    sharded = Accelerator(strategy="fsdp").prepare(net)
    assert torch.equal(sharded.angles, torch.arange(3.0))
    assert bool(whole(sharded[0].weight).isnan().all())  # until something is loaded


@ranks(2)
def test_ranks_that_disagree_fail_together(ctx: ProcessContext) -> None:
    accelerator = Accelerator(strategy="fsdp")
    net = model()
    if ctx.rank == 1:
        net.blocks[0].q = nn.Linear(8, 9)
    with pytest.raises(
        MismatchError,
        match=r"rank 0 has blocks.0.q.bias \(8,\).*rank 1 has blocks.0.q.bias \(9,\)",
    ):
        accelerator.prepare(net)

    def policy(module: nn.Module) -> bool:
        if ctx.rank == 1:
            raise RuntimeError("no policy here")
        return False

    with pytest.raises(
        PeerFailedError if ctx.rank == 0 else RuntimeError, match="no policy here"
    ):
        Accelerator(
            fsdp_plugin=FullyShardedDataParallelPlugin(auto_wrap_policy=policy)
        ).prepare(model())
    for empty_rank, sync, message in (
        (0, True, "are sent by rank 0"),
        (1, False, "Set sync_module_states=True"),
    ):
        with torch.device("meta") if ctx.rank == empty_rank else nullcontext():
            layer = nn.Linear(3, 3)
        with pytest.raises(PrepareError, match=message):
            Accelerator(
                fsdp_plugin=FullyShardedDataParallelPlugin(sync_module_states=sync)
            ).prepare(layer)
    accelerator.prepare(model())  # and the ranks still talk to each other


@ranks(2)
def test_what_cannot_be_sharded_is_said(ctx: ProcessContext) -> None:
    class Actor(nn.Module):
        def __init__(self, trunk: nn.Module) -> None:
            super().__init__()
            self.trunk = trunk
            self.head = nn.Linear(4, 2)

    trunk = nn.Linear(4, 4)
    with pytest.raises(
        PrepareError,
        match=r"'trunk.weight' of Actor is also part of a model that is already sharded",
    ):
        Accelerator(strategy="fsdp").prepare(Actor(trunk), Actor(trunk))
    tied_first, tied_second = nn.Linear(4, 4), nn.Linear(4, 4)
    tied_second.weight = tied_first.weight
    with pytest.raises(PrepareError, match="mark_forward_method"):
        Accelerator(strategy="fsdp").prepare(tied_first, tied_second)
    with pytest.raises(PrepareError, match="ModuleList has no forward"):
        Accelerator(strategy="fsdp").prepare(nn.ModuleList([nn.Linear(2, 2)]))
    lists = FullyShardedDataParallelPlugin(
        auto_wrap_policy=lambda module: isinstance(module, nn.ModuleList)
    )
    with pytest.raises(ConfigError, match="chose 'blocks', a ModuleList"):
        Accelerator(fsdp_plugin=lists).prepare(model())
    mixed = model().bfloat16()
    mixed.norm.float()
    with pytest.raises(
        PrepareError,
        match=r"'embed.weight' is torch.bfloat16 and 'norm.weight' is torch.float32",
    ):
        Accelerator(strategy="fsdp").prepare(mixed)
    half = Accelerator(strategy="fsdp", mixed_precision="bf16").prepare(mixed)
    assert {p.dtype for p in half.parameters()} == {torch.float32}


@ranks(4)
def test_shards_may_be_empty(ctx: ProcessContext) -> None:
    """More ranks than rows, clipped all the same; parameters of any memory format; no parameters at all."""

    def path(accelerator: Accelerator | None) -> list[float]:
        net: nn.Module = seeded(
            lambda: nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 1))
        )
        optimizer: Optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        if accelerator is not None:
            net, optimizer = accelerator.prepare(net, optimizer)
        norms = []
        for step in range(3):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            loss = (
                net(x.chunk(4)[ctx.rank] if accelerator is not None else x)
                .pow(2)
                .mean()
            )
            backward(loss, accelerator)
            clip: Any = (
                nn.utils.clip_grad_norm_
                if accelerator is None
                else accelerator.clip_grad_norm_
            )
            norms.append(float(clip(net.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    accelerator = Accelerator(strategy="fsdp")
    same(torch.tensor(path(accelerator)), torch.tensor(path(None)))
    image = nn.Conv2d(3, 4, 3)
    image.weight.data = image.weight.data.to(memory_format=torch.channels_last)
    image = accelerator.prepare(image)
    accelerator.backward(image(torch.ones(1, 3, 5, 5)).sum())
    assert isinstance(image.weight.grad, DTensor)
    assert torch.equal(accelerator.prepare(nn.ReLU())(torch.ones(2)), torch.ones(2))


@ranks(2)
def test_frozen_reference_models(ctx: ProcessContext) -> None:
    """Sharded when prepared, whole when prepared for evaluation; both compute in the run's precision."""
    accelerator = Accelerator(strategy="fsdp", mixed_precision="bf16")
    reference = accelerator.prepare(model().requires_grad_(False).bfloat16())
    assert isinstance(reference.embed.weight, DTensor)
    assert reference.embed.weight.dtype == torch.bfloat16
    with torch.no_grad():
        assert reference(tokens()).dtype == torch.float32
    left = accelerator.prepare_model(model(), evaluation_mode=True)
    assert not isinstance(left.get_parameter("embed.weight"), DTensor)
    with torch.inference_mode():
        same(left(tokens()), model()(tokens()), 5e-2)


ELEMENTWISE_OPTIONS: tuple[tuple[Any, dict[str, Any]], ...] = (
    *((kind, {"lr": 0.1}) for kind in ELEMENTWISE),
    (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True, "foreach": True}),
    (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.9, "centered": True}),
)


@ranks(1, 2, exhaustive=(4,))
def test_optimizers_on_own_shards_equal_the_whole(ctx: ProcessContext) -> None:
    """Elementwise optimizers, uneven and empty shards: bitwise the whole update, and the state stays cut like before.

    torch's fused CPU kernel rounds the ends of a tensor by another path than its middle: there, to the last bits.
    """
    if ctx.world.size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (ctx.world.size,))
        for kind, options in ELEMENTWISE_OPTIONS:
            torch.manual_seed(0)
            values = [torch.randn(shape) for shape in ((8, 3), (5,), (1, 2))]
            slopes = [[torch.randn_like(value) for value in values] for _ in range(4)]
            parameters = [nn.Parameter(value.clone()) for value in values]
            cut = [
                nn.Parameter(distribute_tensor(value, mesh, [Shard(0)]))
                for value in values
            ]
            unsharded, sharded = kind(parameters, **options), kind(cut, **options)
            for _ in range(2):
                update_own_shards(sharded)
            for step, grads in enumerate(slopes):
                for parameter, shard_parameter, grad in zip(
                    parameters, cut, grads, strict=True
                ):
                    parameter.grad, shard_parameter.grad = (
                        grad.clone(),
                        distribute_tensor(grad, mesh, [Shard(0)]),
                    )
                unsharded.step()
                sharded.step()
                if step == 1:
                    sharded.load_state_dict(sharded.state_dict())
            for parameter, shard_parameter in zip(parameters, cut, strict=True):
                assert isinstance(shard_parameter, DTensor)
                close = torch.allclose if options.get("fused") else torch.equal
                assert close(parameter, shard_parameter.full_tensor()), (
                    f"{kind.__name__}({options})"
                )
                for key, value in unsharded.state[parameter].items():
                    sharded_value = sharded.state[shard_parameter][key]
                    if isinstance(value, torch.Tensor) and value.ndim:
                        assert isinstance(sharded_value, DTensor), (
                            f"{kind.__name__} {key}"
                        )
                        assert sharded_value.placements == shard_parameter.placements, (
                            f"{kind.__name__} {key}"
                        )
                        assert close(value, sharded_value.full_tensor()), (
                            f"{kind.__name__}({options}) {key}"
                        )
    finally:
        if ctx.world.size == 1:
            dist.destroy_process_group()


@ranks(2)
def test_other_optimizers_keep_their_shards(ctx: ProcessContext) -> None:
    """A subclass may look across elements: it sees DTensors, whose operations mean the whole."""

    class Normed(torch.optim.SGD):
        """Divides by the norm of the whole gradient."""

        def _init_group(self, group: Any, params: Any, grads: Any, buffers: Any) -> Any:
            returned = super()._init_group(group, params, grads, buffers)  # type: ignore[no-untyped-call]  # torch's
            grads[:] = [grad / grad.norm() for grad in grads]
            return returned

    mesh = dist.init_device_mesh("cpu", (ctx.world.size,))
    grad = torch.arange(1.0, 7.0)
    cut = nn.Parameter(distribute_tensor(torch.zeros(6), mesh, [Shard(0)]))
    optimizer = Normed([cut], lr=1.0)
    update_own_shards(optimizer)
    cut.grad = distribute_tensor(grad, mesh, [Shard(0)])
    optimizer.step()
    assert isinstance(cut, DTensor)
    same(cut.full_tensor(), -grad / grad.norm(), 1e-6)


@ranks(1)
def test_a_world_of_one_needs_one_group(ctx: ProcessContext) -> None:
    """Groups cost and free nothing there; named blocks, offload and mixed masters keep theirs; stray calls are told."""

    def groups(net: nn.Module) -> int:
        return sum(isinstance(module, FSDPModule) for module in net.modules())

    named = FullyShardedDataParallelPlugin(
        transformer_cls_names_to_wrap=(type(model().blocks[0]).__name__,)
    )
    offloaded = FullyShardedDataParallelPlugin(cpu_offload=True)
    blocks = len(model().blocks)
    usual = FullyShardedDataParallelPlugin()
    for plugin, expected in ((usual, 1), (named, blocks + 1), (offloaded, blocks + 1)):
        assert groups(Accelerator(fsdp_plugin=plugin).prepare(model())) == expected, (
            f"{plugin}"
        )
    mixed = model()
    mixed.blocks[1].double()
    accelerator = Accelerator(fsdp_plugin=usual)
    assert groups(accelerator.prepare(mixed)) == blocks + 1
    net = model()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    accelerator.backward(next_token_loss(net(tokens()), tokens()))
    optimizer.step()
    with pytest.raises(StepError, match="outside its model's forward"):
        net.blocks[0](torch.randn(1, 4, 8))
