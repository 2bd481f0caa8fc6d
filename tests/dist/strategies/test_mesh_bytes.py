"""The bytes a rank holds and sends are those of the formulas: on simulated meshes of 8, 64 and 1024, and counted in real steps."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed import fake_pg

from hasten import (
    Accelerator,
    ParallelismConfig,
    PipelineParallelConfig,
    TorchContextParallelConfig,
)
from hasten.runtime import bytes_plan
from hasten.runtime.bytes_plan import BytesBetweenSteps, Traffic, Weights, held_bytes
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh_plan import MeshSpec
from hasten.testing.pool import ranks
from hasten.testing.toys import TinyLM, next_token_loss, seeded
from tests.support.sent_bytes import (
    context_traffic,
    count_sent,
    expert_traffic,
    stage_traffic,
)
from tests.support.toys import MixtureBlock, TinyMixture

WIDE: Final = 1024
Sizes = dict[str, Any]  # Any: whole numbers, as keywords of ParallelismConfig


def wide() -> nn.Module:
    """Two blocks whose every dimension is a multiple of 1024, so that shards are even at every world size here."""
    return nn.Sequential(
        nn.Sequential(
            *(
                nn.Sequential(nn.Linear(WIDE, 2 * WIDE), nn.Linear(2 * WIDE, WIDE))
                for _ in range(2)
            )
        )
    )


def mixture() -> nn.Module:
    """64 experts, next to which router and norm count little."""
    return nn.Sequential(MixtureBlock(number=64, width=128, k=2))


@contextmanager
def simulated(world_size: int) -> Iterator[None]:
    """A process group of which this process is rank 0 and the others do not exist."""
    assert fake_pg.__name__, "importing it registers the backend"
    dist.init_process_group(
        "fake", store=dist.HashStore(), rank=0, world_size=world_size
    )
    try:
        yield
    finally:
        gc.collect()
        dist.destroy_process_group()


def size(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def measured(
    net: nn.Module, config: ParallelismConfig
) -> tuple[BytesBetweenSteps, Accelerator]:
    """What rank 0 holds after one step; experts get their gradients by hand, because nobody answers their exchange."""
    accelerator = Accelerator(parallelism_config=config)
    net, optimizer = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), foreach=False)
    )
    if config.ep_size > 1:
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
    else:
        accelerator.backward(net(torch.randn(1, WIDE)).sum())
    optimizer.step()
    parameters = list(net.parameters())
    moments = [
        optimizer.state[p][key] for p in parameters for key in ("exp_avg", "exp_avg_sq")
    ]
    gradients = [p.grad for p in parameters if p.grad is not None]
    return BytesBetweenSteps(
        sum(map(size, parameters)), sum(map(size, gradients)), sum(map(size, moments))
    ), accelerator


MESHES: Final = MappingProxyType[
    str, tuple[Callable[[], nn.Module], Callable[[int], Sizes]]
](
    {
        "shards": (wide, lambda world: {"dp_shard_size": world}),
        "hybrid shards": (
            wide,
            lambda world: {"dp_shard_size": world // 4, "dp_replicate_size": 4},
        ),
        "tp in shards": (
            wide,
            lambda world: {"tp_size": 4, "dp_shard_size": world // 4},
        ),
        "experts, copies": (mixture, lambda world: {"ep_size": min(world, 64)}),
        "experts in shards": (
            mixture,
            lambda world: {"ep_size": min(world, 64), "dp_shard_size": world},
        ),
    }
)


@ranks(1)
@pytest.mark.slow
@pytest.mark.parametrize("layout", MESHES)
def test_each_rank_holds_what_the_plan_says(ctx: ProcessContext, layout: str) -> None:
    build, sizes = MESHES[layout]
    net = build()
    total = sum(p.numel() for p in net.parameters())
    experts = sum(p.numel() for name, p in net.named_parameters() if "experts" in name)
    for world in (8, 64, 1024):
        with simulated(world):
            config = ParallelismConfig(
                **sizes(world), tp_plan={"0.*.0": "colwise", "0.*.1": "rowwise"}
            )
            measured_bytes, accelerator = measured(build(), config)
            mesh = accelerator.ctx.mesh
            del accelerator
        split = total if mesh.tp > 1 else 0
        plan = held_bytes(
            mesh, Weights(whole=total - split - experts, split=split, experts=experts)
        )
        for kind in ("parameters", "gradients", "optimizer", "total"):
            actual_bytes, expected = getattr(measured_bytes, kind), getattr(plan, kind)
            assert actual_bytes == pytest.approx(expected, rel=0.05), (
                f"{world} ranks, {kind}: {actual_bytes} instead of {expected}"
            )


Kinds = dict[tuple[str, str], float]
"""Bytes by axis and operator."""
Run = Callable[[Accelerator, nn.Module, Tensor], Tensor | None]


def plain_pass(accelerator: Accelerator, net: nn.Module, batch: Tensor) -> None:
    accelerator.backward(next_token_loss(net(batch), batch))


def counted(
    net: nn.Module, settings: dict[str, Any], batch: Tensor, run: Run = plain_pass
) -> Kinds:
    """The bytes that a later step of accumulation 2 sends, on the mean of all ranks: results of experts are sent unevenly."""
    accelerator = Accelerator(gradient_accumulation_steps=2, **settings)
    net, optimizer = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), foreach=True)
    )

    def step() -> None:
        for _ in range(2):
            with accelerator.accumulate(net):
                run(accelerator, net, batch)
                optimizer.step()
                optimizer.zero_grad()

    step()
    step()  # DDP has decided its buckets now
    with count_sent(accelerator.ctx) as counter:
        step()
    assert not counter.unknown, f"not counted: {counter.unknown}"
    everyone: list[Kinds] = accelerator.ctx.world.all_gather_object(counter.by_kind)
    accelerator.end_training()
    kinds = {kind for sent in everyone for kind in sent}
    return {
        kind: sum(sent.get(kind, 0) for sent in everyone) / len(everyone)
        for kind in kinds
    }


def by_axis(kinds: Kinds) -> Traffic:
    total: Traffic = {}
    for (axis, _), num_bytes in kinds.items():
        total[axis] = total.get(axis, 0) + num_bytes
    return total


def sized(net: nn.Module) -> tuple[int, int]:
    """The parameters beside experts, and those of experts."""
    experts = sum(p.numel() for name, p in net.named_parameters() if "experts" in name)
    return sum(p.numel() for p in net.parameters()) - experts, experts


def tokens(length: int = 6) -> Tensor:
    return torch.arange(4 * length).view(4, length) % 16


def text(**options: Any) -> TinyLM:  # Any: whole numbers and flags
    return seeded(
        lambda: TinyLM(
            **{"vocab": 16, "width": 8, "heads": 2, "depth": 2, "context": 6, **options}
        )
    )


def mesh_of(settings: dict[str, Any]) -> MeshSpec:
    return Accelerator(**settings).ctx.mesh


@ranks(2)
def test_real_steps_send_what_the_formulas_say(ctx: ProcessContext) -> None:
    """Two micro-steps on two ranks: all sizes divide evenly, so that the numbers are equal, not only near."""

    def data(net: nn.Module, mesh: MeshSpec) -> Traffic:
        unsplit, experts = sized(net)
        return bytes_plan.data_traffic(
            mesh, Weights(whole=unsplit, experts=experts), micro_steps=2
        )

    def moved(mesh: MeshSpec) -> Traffic:
        traffic = expert_traffic(
            mesh, tokens=tokens().numel(), k=2, width=8, num_experts=4
        )
        return {"ep": 2 * 2 * traffic["ep"]}  # two modules, two micro-steps

    for settings in ({"strategy": "ddp"}, {"strategy": "fsdp"}):
        expected = data(text(), mesh_of(settings))
        assert expected, "both send something"
        assert by_axis(counted(text(), settings, tokens())) == pytest.approx(
            expected
        ), str(settings)
    layouts: tuple[Sizes, ...] = ({"dp_shard_size": 2}, {})
    for sizes in layouts:
        moe = seeded(lambda: TinyMixture(vocab=16, width=8))
        divided: dict[str, Any] = {
            "parallelism_config": ParallelismConfig(ep_size=2, **sizes)
        }
        expected = data(moe, mesh_of(divided)) | moved(mesh_of(divided))
        assert by_axis(counted(moe, divided, tokens())) == pytest.approx(expected), str(
            sizes
        )


@ranks(2)
def test_split_layers_send_what_the_formula_says(ctx: ProcessContext) -> None:
    plan = {
        "blocks.*.[qkv]": "colwise",
        "blocks.*.o": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
    }
    config = ParallelismConfig(tp_size=2, tp_plan=plan)
    settings: dict[str, Any] = {"parallelism_config": config}
    sent_bytes = counted(text(), settings, tokens())
    num_sums = 2 * (3 + 1 + 1 + 1)  # in each of two blocks: q, k, v, o, up, down
    once = bytes_plan.tensor_traffic(mesh_of(settings), tokens=24, summed=8 * num_sums)
    assert by_axis(sent_bytes) == pytest.approx({"tp": 2 * once["tp"]}), str(sent_bytes)


@ranks(2)
@pytest.mark.parametrize("comm_strategy", ["allgather", "ulysses"])
def test_attention_over_parts_of_sequences_sends_what_the_formula_says(
    ctx: ProcessContext, comm_strategy: Any
) -> None:
    def run(accelerator: Accelerator, net: nn.Module, batch: Tensor) -> None:
        tensors = [batch.clone(), torch.arange(8).expand(4, -1).clone()]
        with accelerator.context_parallel(tensors, [1, 1], labels=None):
            accelerator.backward(net(*tensors).square().mean())

    config = ParallelismConfig(
        cp_size=2, cp_handler=TorchContextParallelConfig(cp_comm_strategy=comm_strategy)
    )
    settings: dict[str, Any] = {"parallelism_config": config}
    net = text(context=8)
    mesh, (unsplit, _) = mesh_of(settings), sized(net)
    sent_bytes = by_axis(counted(net, settings, tokens(8), run))
    once = context_traffic(
        mesh, exchange=comm_strategy, tokens=4 * 8 // 2, keys=8, queries=8
    )
    grads = bytes_plan.data_traffic(
        mesh, Weights(whole=unsplit), micro_steps=2, sharded=False
    )
    # two attentions, two micro-steps
    assert sent_bytes == pytest.approx({"cp": 2 * 2 * once["cp"] + grads["cp"]})
    sharded = by_axis(
        counted(text(context=8), {**settings, "strategy": "fsdp"}, tokens(8), run)
    )
    shards = bytes_plan.data_traffic(mesh, Weights(whole=unsplit), micro_steps=2)
    assert sharded == pytest.approx({"cp": 2 * 2 * once["cp"], **shards})


@ranks(2)
@pytest.mark.parametrize(
    ("schedule", "stages"), [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2)]
)
def test_stages_send_what_the_formula_says(
    ctx: ProcessContext, schedule: Any, stages: int
) -> None:
    def run(accelerator: Accelerator, net: nn.Module, batch: Tensor) -> None:
        accelerator.forward_backward(
            net, batch, lambda net, batch: next_token_loss(net(batch), batch)
        )

    handler = PipelineParallelConfig(schedule=schedule)
    settings: dict[str, Any] = {
        "parallelism_config": ParallelismConfig(pp_size=2, pp_handler=handler)
    }
    sent_bytes = counted(text(depth=4), settings, tokens(), run)
    mesh = mesh_of(settings)
    each = [
        stage_traffic(mesh, stage=rank, tokens=24, width=8, stages_per_rank=stages)[
            "pp"
        ]
        for rank in (0, 1)
    ]
    # two micro-steps, the mean of two ranks
    assert sent_bytes["pp", "send"] == pytest.approx(2 * sum(each) / 2)
    assert by_axis(sent_bytes)["pp"] == pytest.approx(
        sent_bytes["pp", "send"], rel=0.02
    ), "beside them, losses only"


@ranks(1)
@pytest.mark.slow
def test_steps_of_large_meshes_send_what_the_formulas_say_by_axis(
    ctx: ProcessContext,
) -> None:
    """Shards around split layers, on simulated meshes."""
    for world in (8, 64, 1024):
        with simulated(world):
            plan = {"0.*.0": "colwise", "0.*.1": "rowwise"}
            config = ParallelismConfig(
                tp_size=4, dp_shard_size=world // 4, tp_plan=plan
            )
            accelerator = Accelerator(parallelism_config=config)
            net = wide()
            total = sum(p.numel() for p in net.parameters())
            net, optimizer = accelerator.prepare(
                net, torch.optim.AdamW(net.parameters(), foreach=False)
            )
            with count_sent(accelerator.ctx) as counter:
                accelerator.backward(
                    net(torch.randn(4, WIDE, requires_grad=True)).sum()
                )
                optimizer.step()
            mesh, sent_bytes = accelerator.ctx.mesh, counter.by_axis
            del accelerator, net, optimizer
        expected = bytes_plan.data_traffic(mesh, Weights(whole=0, split=total))
        expected |= bytes_plan.tensor_traffic(mesh, tokens=4, summed=2 * 2 * WIDE)
        assert sent_bytes == pytest.approx(expected, rel=0.05), (
            f"{world} ranks: {sent_bytes} instead of {expected}"
        )
