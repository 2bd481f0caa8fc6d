"""Saved on one layout, loaded on another: every pair of layouts on 1, 2 and 4 ranks, bitwise, optimizer included."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hasten import Accelerator
from hasten.config.parallel import ParallelismConfig, TorchContextParallelConfig
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import Pool, ranks
from hasten.testing.toys import TinyLM, next_token_loss, seeded

LAYOUTS: Final = (
    *((strategy, world) for strategy in ("auto", "fsdp") for world in (1, 2, 4)),
    *(("tp", 2), ("tp+fsdp", 4), ("tp+ddp", 4), ("cp+fsdp", 4)),
)
SETTINGS: Final = MappingProxyType(
    {
        "tp": {"parallelism_config": ParallelismConfig(tp_size=2)},
        "tp+fsdp": {"parallelism_config": ParallelismConfig(tp_size=2, dp_shard_size=2)},
        "tp+ddp": {"parallelism_config": ParallelismConfig(tp_size=2, dp_replicate_size=2)},
        "cp+fsdp": {
            "parallelism_config": ParallelismConfig(
                cp_size=2, dp_shard_size=2, cp_handler=TorchContextParallelConfig(cp_comm_strategy="ulysses")
            )
        },
    }
)
State = dict[str, Tensor]


def run(strategy: str, seed: int) -> tuple[Accelerator, nn.Module, Optimizer]:
    accelerator = Accelerator(**SETTINGS.get(strategy, {"strategy": strategy}))
    net: nn.Module = seeded(lambda: TinyLM(vocab=11, width=8, heads=2, depth=2, context=6, tied=True), seed)
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.05, foreach=True))
    return accelerator, net, optimizer


def step(accelerator: Accelerator, net: nn.Module, optimizer: Optimizer) -> None:
    batch, positions = torch.arange(24).reshape(4, 6) % 11, torch.arange(6)
    with accelerator.context_parallel([batch, positions], [1, 0]):
        accelerator.backward(next_token_loss(net(batch, positions), batch))
    optimizer.step()
    optimizer.zero_grad()


def whole(accelerator: Accelerator, net: nn.Module, optimizer: Optimizer) -> State:
    """Every weight and moment, whole."""
    held: State = {}
    for name, parameter in accelerator.unwrap_model(net).named_parameters():
        for key, value in {"weight": parameter.detach(), **optimizer.state[parameter]}.items():
            held[f"{name}/{key}"] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    return held


def save(ctx: ProcessContext, strategy: str, folder: Path) -> State:
    accelerator, net, optimizer = run(strategy, seed=1)
    for _ in range(2):
        step(accelerator, net, optimizer)
    accelerator.save_state(folder)
    return whole(accelerator, net, optimizer)


def load(ctx: ProcessContext, strategy: str, folders: list[Path]) -> list[State]:
    found = []
    for folder in folders:
        accelerator, net, optimizer = run(strategy, seed=2)
        accelerator.load_state(folder)
        found.append(whole(accelerator, net, optimizer))
    step(accelerator, net, optimizer)  # and it goes on from there
    return found


@pytest.mark.timeout(300)
def test_every_pair_of_layouts_is_bitwise_equal(rank_pool: Pool, tmp_path: Path) -> None:
    folders = [tmp_path / f"{strategy}-{world}" for strategy, world in LAYOUTS]
    saved = [
        rank_pool.run(save, world, strategy, folder)[0]
        for (strategy, world), folder in zip(LAYOUTS, folders, strict=True)
    ]
    for strategy, world in LAYOUTS:
        for state, source, expected in zip(
            rank_pool.run(load, world, strategy, folders)[0], LAYOUTS, saved, strict=True
        ):
            assert state.keys() == expected.keys()
            for name, value in state.items():
                assert torch.equal(value, expected[name]), f"{name}: saved by {source}, loaded by {(strategy, world)}"


@ranks(2)
def test_sharded_saves_in_the_background(ctx: ProcessContext, tmp_path: Path) -> None:
    """What is saved is the state at the call, whatever the next steps do to it."""
    accelerator, net, optimizer = run("fsdp", seed=1)
    step(accelerator, net, optimizer)
    expected = whole(accelerator, net, optimizer)
    accelerator.save_state(tmp_path / "one", blocking=False)
    step(accelerator, net, optimizer)
    accelerator.wait_for_saves()
    accelerator.load_state(tmp_path / "one")
    state = whole(accelerator, net, optimizer)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    accelerator.end_training()
