"""Muon's update of sharded matrices equals the update of whole matrices on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from hasten.extensions.muon.muon import Muon
from hasten.extensions.muon.optimizers import optimizers
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

STEPS = 20
WIDTH = 12
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(5, WIDTH, WIDTH) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.einsum("bi,eij->bj", x, self.weights) / 5


class Net(nn.Module):
    """Five blocks of one shape, so that a round of matrices is incomplete on two and four ranks, and a stack of experts."""

    def __init__(self, hidden: int = 20, experts: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(5))
        self.experts = Experts() if experts else nn.Identity()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.experts(x))
        return out


def batch(step: int) -> Tensor:
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(step))


def plain(net: nn.Module, steps: int = STEPS) -> nn.Module:
    muon_optimizers = optimizers(net, lr=0.02, adamw_lr=1e-2, show=False)
    for step in range(steps):
        torch.autograd.backward((net(batch(step)) - 1).pow(2).mean())
        for optimizer in muon_optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return net


def train(
    accelerator: Accelerator,
    net: nn.Module,
    prepared_optimizers: list[Any],
    steps: range,
    num_shares: int,
    share_index: int,
) -> None:
    for step in steps:
        accelerator.backward(
            (net(batch(step).chunk(num_shares)[share_index]) - 1).pow(2).mean()
        )
        for optimizer in prepared_optimizers:
            optimizer.step()
            optimizer.zero_grad()


def check(expected: nn.Module, model: nn.Module, description: str) -> None:
    for (name, a), b in zip(
        model.named_parameters(), expected.parameters(), strict=True
    ):
        full_parameter = a.full_tensor() if hasattr(a, "full_tensor") else a
        torch.testing.assert_close(
            full_parameter.detach(),
            b.detach(),
            rtol=0,
            atol=1e-5,
            msg=f"{description} {name}: {full_parameter} {b}",
        )


def sharded(
    hidden: int, sharding: bool = True, experts: bool = True, **settings: Any
) -> None:
    accelerator = Accelerator(cpu=True, **settings)
    net = Net(hidden, experts)
    muon_optimizers = optimizers(net, lr=0.02, adamw_lr=1e-2, show=False)
    assert [type(optimizer).__name__ for optimizer in muon_optimizers] == [
        "Muon",
        "AdamW",
    ]
    net, *muon_optimizers = accelerator.prepare(net, *muon_optimizers)
    tensor = (
        settings["parallelism_config"].tp_size
        if "parallelism_config" in settings
        else 1
    )
    num_shares = accelerator.num_processes // tensor
    train(
        accelerator,
        net,
        muon_optimizers,
        range(STEPS),
        num_shares,
        accelerator.process_index // tensor,
    )
    if sharding:
        assert any(hasattr(p, "full_tensor") for p in net.parameters())
    check(plain(Net(hidden, experts)), accelerator.unwrap_model(net), str(settings))


@ranks(2, exhaustive=(3, 4))
@pytest.mark.parametrize("hidden", [20, 7])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_update_is_that_of_whole_matrices(
    ctx: ProcessContext, strategy: str, hidden: int
) -> None:
    sharded(hidden, strategy == "fsdp", strategy=strategy)


@ranks(2)
def test_under_tensor_parallelism(ctx: ProcessContext) -> None:
    sharded(20, parallelism_config=ParallelismConfig(tp_size=2, tp_plan=PLAN))


@ranks(4)
@pytest.mark.parametrize("kind", ["hybrid", "tensor"])
def test_on_meshes_of_two_axes(ctx: ProcessContext, kind: str) -> None:
    sizes: dict[str, Any] = (
        {"dp_replicate_size": 2}
        if kind == "hybrid"
        else {"tp_size": 2, "tp_plan": PLAN}
    )
    sharded(
        20,
        strategy="fsdp",
        parallelism_config=ParallelismConfig(dp_shard_size=2, **sizes),
    )


@ranks(2, exhaustive=(4,))
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_resumed_run_equals_one_that_was_not_stopped(
    ctx: ProcessContext, tmp_path: Path, strategy: str
) -> None:
    where: str = ctx.world.broadcast_object(str(tmp_path))

    def fresh() -> tuple[Accelerator, nn.Module, list[Any]]:
        accelerator = Accelerator(cpu=True, strategy=strategy)
        net = Net()
        net, *prepared_optimizers = accelerator.prepare(
            net, *optimizers(net, lr=0.02, adamw_lr=1e-2, show=False)
        )
        return accelerator, net, prepared_optimizers

    accelerator, net, prepared_optimizers = fresh()
    share = (accelerator.num_processes, accelerator.process_index)
    train(accelerator, net, prepared_optimizers, range(6), *share)
    accelerator.save_state(f"{where}/middle")
    train(accelerator, net, prepared_optimizers, range(6, 12), *share)
    uninterrupted = {
        name: value.clone() for name, value in accelerator.get_state_dict(net).items()
    }
    accelerator, net, prepared_optimizers = fresh()
    accelerator.load_state(f"{where}/middle")
    train(accelerator, net, prepared_optimizers, range(6, 12), *share)
    resumed = accelerator.get_state_dict(net)
    assert all(
        torch.equal(resumed[name], value) for name, value in uninterrupted.items()
    )


@ranks(2)
def test_a_checkpoint_is_resharded(ctx: ProcessContext, tmp_path: Path) -> None:
    """Saved under FSDP2 on two ranks and loaded by a plain loop on one process: the momentum is the whole one."""
    where: str = ctx.world.broadcast_object(str(tmp_path))
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    net = Net()
    net, *fsdp_optimizers = accelerator.prepare(
        net, *optimizers(net, lr=0.02, adamw_lr=1e-2, show=False)
    )
    train(accelerator, net, fsdp_optimizers, range(4), 2, accelerator.process_index)
    accelerator.save_state(f"{where}/saved", safe_serialization=True)
    ddp = Accelerator(cpu=True, strategy="ddp")
    model = Net()
    model, *ddp_optimizers = ddp.prepare(
        model, *optimizers(model, lr=0.02, adamw_lr=1e-2, show=False)
    )
    ddp.load_state(f"{where}/saved")
    train(ddp, model, ddp_optimizers, range(4, STEPS), 2, ddp.process_index)
    check(plain(Net()), ddp.unwrap_model(model), "resharded")


@ranks(2)
def test_cuts_that_leave_a_rank_without_rows(ctx: ProcessContext) -> None:
    accelerator = Accelerator(
        cpu=True, strategy="fsdp", fsdp_plugin=FullyShardedDataParallelPlugin()
    )
    torch.manual_seed(1)
    one_row = nn.Linear(4, 1, bias=False)
    expected = one_row.weight.detach().clone()
    reference = Muon([nn.Parameter(expected)], lr=0.1)
    reference.param_groups[0]["params"][0].grad = torch.ones(1, 4)
    reference.step()
    net, optimizer = accelerator.prepare(one_row, Muon(one_row.parameters(), lr=0.1))
    accelerator.backward(net(torch.ones(2, 4)).mean())
    optimizer.step()
    torch.testing.assert_close(
        net.weight.full_tensor().detach(),
        reference.param_groups[0]["params"][0].detach(),
    )
