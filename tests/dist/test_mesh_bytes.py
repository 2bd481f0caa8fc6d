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
from torch.utils._python_dispatch import TorchDispatchMode

from hasten import Accelerator, ParallelismConfig
from hasten.runtime import bytes_plan
from hasten.runtime.bytes_plan import Held, Traffic, Weights, all_reduced, exchanged, held_bytes
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.testing.toys import MixtureBlock, TinyLM, TinyMixture, next_token_loss, seeded

WIDE: Final = 1024
Sizes = dict[str, Any]  # Any: whole numbers, as keywords of ParallelismConfig


def wide() -> nn.Module:
    """Two blocks whose every dimension is a multiple of 1024, so that shards are even at every world size here."""
    return nn.Sequential(
        nn.Sequential(*(nn.Sequential(nn.Linear(WIDE, 2 * WIDE), nn.Linear(2 * WIDE, WIDE)) for _ in range(2)))
    )


def mixture() -> nn.Module:
    """64 experts, next to which router and norm count little."""
    return nn.Sequential(MixtureBlock(number=64, width=256, k=2))


@contextmanager
def simulated(world_size: int) -> Iterator[None]:
    """A process group of which this process is rank 0 and the others do not exist."""
    assert fake_pg.__name__, "importing it registers the backend"
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        gc.collect()
        dist.destroy_process_group()


def size(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def measured(net: nn.Module, config: ParallelismConfig) -> tuple[Held, Accelerator]:
    """What rank 0 holds after one step; experts get their gradients by hand, because nobody answers their exchange."""
    accelerator = Accelerator(parallelism_config=config)
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), foreach=False))
    if config.ep_size > 1:
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
    else:
        accelerator.backward(net(torch.randn(1, WIDE)).sum())
    optimizer.step()
    parameters = list(net.parameters())
    moments = [optimizer.state[p][key] for p in parameters for key in ("exp_avg", "exp_avg_sq")]
    gradients = [p.grad for p in parameters if p.grad is not None]
    return Held(sum(map(size, parameters)), sum(map(size, gradients)), sum(map(size, moments))), accelerator


MESHES: Final = MappingProxyType[str, tuple[Callable[[], nn.Module], Callable[[int], Sizes]]](
    {
        "shards": (wide, lambda world: {"dp_shard_size": world}),
        "hybrid shards": (wide, lambda world: {"dp_shard_size": world // 4, "dp_replicate_size": 4}),
        "tp in shards": (wide, lambda world: {"tp_size": 4, "dp_shard_size": world // 4}),
        "experts, copies": (mixture, lambda world: {"ep_size": min(world, 64)}),
        "experts in shards": (mixture, lambda world: {"ep_size": min(world, 64), "dp_shard_size": world}),
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
            config = ParallelismConfig(**sizes(world), tp_plan={"0.*.0": "colwise", "0.*.1": "rowwise"})
            held, accelerator = measured(build(), config)
            mesh = accelerator.ctx.mesh
            del accelerator
        split = total if mesh.tp > 1 else 0
        plan = held_bytes(mesh, Weights(whole=total - split - experts, split=split, experts=experts))
        for kind in ("parameters", "gradients", "optimizer", "total"):
            got, expected = getattr(held, kind), getattr(plan, kind)
            assert got == pytest.approx(expected, rel=0.05), f"{world} ranks, {kind}: {got} instead of {expected}"


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counts the bytes this rank sends, by kind of collective."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.sent: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, name = func.name().split("::")
        if space == "c10d":
            found = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
            number = next(n for n in (_group_size(arg) for arg in found) if n is not None)
            self._count(name.partition(".")[0], args, number)
        assert space != "_c10d_functional", f"{name} is not counted here"
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any, number: int) -> None:
        match name:
            case "allreduce_":
                self._add("all-reduce", all_reduced(sum(map(size, args[0])), number))
            case "_allgather_base_":
                self._add("shards", exchanged(size(args[0]), number))
            case "_reduce_scatter_base_":
                self._add("shards", exchanged(size(args[1]), number))
            case "allgather_":
                self._add("gathered", exchanged(sum(map(size, args[0][0])), number))
            case "alltoall_base_":
                self._add("all-to-all", exchanged(size(args[1]), number))
            case "send":
                self._add("send", sum(map(size, args[0])))
            case "recv_" | "barrier":
                pass
            case other:
                raise AssertionError(f"{other} is not counted here")

    def _add(self, kind: str, num_bytes: float) -> None:
        if num_bytes:
            self.sent[kind] = self.sent.get(kind, 0) + num_bytes


def _group_size(value: torch.ScriptObject) -> int | None:
    try:
        return dist.ProcessGroup.unbox(value).size()
    except RuntimeError:  # another object of torch's, such as the kind of a reduction
        return None


def counted(net: nn.Module, settings: dict[str, Any], batch: Tensor) -> dict[str, float]:
    """The bytes that a later step of accumulation 2 sends, on the mean of all ranks: results of experts are sent unevenly."""
    accelerator = Accelerator(gradient_accumulation_steps=2, **settings)
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), foreach=True))

    def step() -> None:
        for _ in range(2):
            with accelerator.accumulate(net):
                accelerator.backward(next_token_loss(net(batch), batch))
                optimizer.step()
                optimizer.zero_grad()

    step()
    step()  # DDP has decided its buckets now
    counter = Counted()
    with counter:
        step()
    everyone: list[dict[str, float]] = accelerator.comm.all_gather_object(counter.sent)
    accelerator.end_training()
    return {kind: sum(sent.get(kind, 0) for sent in everyone) / len(everyone) for kind in counter.sent}


def sized(net: nn.Module) -> tuple[int, int]:
    """The parameters beside experts, and those of experts."""
    experts = sum(p.numel() for name, p in net.named_parameters() if "experts" in name)
    return sum(p.numel() for p in net.parameters()) - experts, experts


@ranks(2)
def test_real_steps_send_what_the_formulas_say(ctx: ProcessContext) -> None:
    """Two micro-steps on two ranks: all sizes divide evenly, so that the numbers are equal, not only near."""
    batch = torch.arange(24).view(4, 6) % 16
    text = seeded(lambda: TinyLM(vocab=16, width=8, heads=2, depth=2, context=6))
    moe = seeded(lambda: TinyMixture(vocab=16, width=8))

    def mesh_of(settings: dict[str, Any]) -> Any:
        return Accelerator(**settings).ctx.mesh

    def check(net: nn.Module, settings: dict[str, Any], expected: Callable[[Any], dict[str, float]]) -> None:
        plan = expected(mesh_of(settings))
        assert counted(net, settings, batch) == pytest.approx(plan), str(settings)

    def data(net: nn.Module, mesh: Any) -> Traffic:
        whole, experts = sized(net)
        return bytes_plan.data_traffic(mesh, Weights(whole=whole, experts=experts), micro_steps=2)

    def moved(mesh: Any) -> float:
        one = bytes_plan.expert_traffic(mesh, tokens=batch.numel(), k=2, width=8, num_experts=4)
        return 2 * 2 * one["ep"]  # two modules, two micro-steps

    check(text, {"strategy": "ddp"}, lambda mesh: {"all-reduce": data(text, mesh)["dp_replicate"]})
    text = seeded(lambda: TinyLM(vocab=16, width=8, heads=2, depth=2, context=6))
    check(text, {"strategy": "fsdp"}, lambda mesh: {"shards": data(text, mesh)["dp_shard"]})
    sharded = {"parallelism_config": ParallelismConfig(ep_size=2, dp_shard_size=2)}
    check(moe, sharded, lambda mesh: {"shards": data(moe, mesh)["dp_shard"], "all-to-all": moved(mesh)})
    moe = seeded(lambda: TinyMixture(vocab=16, width=8))
    copied = {"parallelism_config": ParallelismConfig(ep_size=2)}
    check(moe, copied, lambda mesh: {"all-reduce": data(moe, mesh)["dp_replicate"], "all-to-all": moved(mesh)})


@ranks(2)
def test_split_layers_send_what_the_formula_says(ctx: ProcessContext) -> None:
    plan = {"blocks.*.[qkv]": "colwise", "blocks.*.o": "rowwise", "blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    settings: dict[str, Any] = {"parallelism_config": ParallelismConfig(tp_size=2, tp_plan=plan)}
    batch = torch.arange(24).view(4, 6) % 16
    net = seeded(lambda: TinyLM(vocab=16, width=8, heads=2, depth=2, context=6))
    mesh = Accelerator(**settings).ctx.mesh
    once = bytes_plan.tensor_traffic(mesh, tokens=24, width=8, colwise=2 * 4, rowwise=2 * 2)
    assert counted(net, settings, batch) == pytest.approx({"all-reduce": 2 * once["tp"]})
