"""Checkpoints of divided experts: saved on one mesh, loaded on any other, bit for bit; merged offline."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hasten import Accelerator, ParallelismConfig
from hasten.checkpoint.export import read_model
from hasten.checkpoint.merge import merge
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import Pool, ranks
from hasten.testing.toys import TinyMixture, next_token_loss, seeded

SETTINGS: Final = MappingProxyType[str, dict[str, Any]](
    {
        "one": {},
        "ddp": {},
        "fsdp": {"strategy": "fsdp"},
        "ep": {"parallelism_config": ParallelismConfig(ep_size=2)},
        "ep+fsdp": {"parallelism_config": ParallelismConfig(ep_size=2, dp_shard_size=2)},
        "ep of four": {"parallelism_config": ParallelismConfig(ep_size=4, dp_shard_size=4)},
        "ep sharded": {"parallelism_config": ParallelismConfig(ep_size=2, dp_shard_size=4)},
        "ep copied": {"parallelism_config": ParallelismConfig(ep_size=2)},
        "ep hybrid": {"parallelism_config": ParallelismConfig(ep_size=2, dp_shard_size=2, dp_replicate_size=2)},
    }
)
FEW: Final = (("one", 1), ("ep", 2), ("ep+fsdp", 2))
FOUR: Final = (("ep of four", 4), ("ep sharded", 4), ("ep copied", 4), ("ep hybrid", 4))
ALL: Final = (*FEW, ("ddp", 2), ("fsdp", 2), *FOUR)
State = dict[str, Tensor]


def run(layout: str, seed: int) -> tuple[Accelerator, nn.Module, Optimizer]:
    accelerator = Accelerator(**SETTINGS[layout])
    net: nn.Module = seeded(lambda: TinyMixture(vocab=12), seed)
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.05, foreach=True))
    return accelerator, net, optimizer


def step(accelerator: Accelerator, net: nn.Module, optimizer: Optimizer) -> None:
    batch = torch.arange(accelerator.process_index, 24 + accelerator.process_index).reshape(4, 6) % 11
    accelerator.backward(next_token_loss(net(batch), batch))
    optimizer.step()
    optimizer.zero_grad()


def whole(accelerator: Accelerator, net: nn.Module, optimizer: Optimizer) -> State:
    """Every weight and moment, whole."""
    held: State = {}
    for name, parameter in accelerator.unwrap_model(net).named_parameters():
        for key, value in {"weight": parameter.detach(), **optimizer.state[parameter]}.items():
            held[f"{name}/{key}"] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    return held


def save(ctx: ProcessContext, layout: str, folder: Path) -> State:
    accelerator, net, optimizer = run(layout, seed=1)
    for _ in range(2):
        step(accelerator, net, optimizer)
    accelerator.save_state(folder)
    return whole(accelerator, net, optimizer)


def load(ctx: ProcessContext, layout: str, folders: list[Path]) -> list[State]:
    found = []
    accelerator, net, optimizer = run(layout, seed=2)
    for folder in folders:
        accelerator.load_state(folder)
        found.append(whole(accelerator, net, optimizer))
    step(accelerator, net, optimizer)  # and it goes on from there
    return found


@pytest.mark.parametrize("layouts", [FEW, pytest.param(ALL, marks=pytest.mark.exhaustive)], ids=["few", "all"])
def test_every_pair_with_experts_is_bitwise_equal(
    rank_pool: Pool, tmp_path: Path, layouts: tuple[tuple[str, int], ...]
) -> None:
    folders = {layout: tmp_path / layout.replace(" ", "-") for layout, _ in layouts}
    saved = {layout: rank_pool.run(save, world, layout, folders[layout])[0] for layout, world in layouts}
    for layout, world in layouts:
        sources = [other for other, _ in layouts if "ep" in layout or "ep" in other]
        loaded = rank_pool.run(load, world, layout, [folders[source] for source in sources])[0]
        for state, source in zip(loaded, sources, strict=True):
            assert state.keys() == saved[source].keys()
            for name, value in state.items():
                assert torch.equal(value, saved[source][name]), f"{name}: saved by {source}, loaded by {layout}"


@ranks(2)
def test_experts_save_in_the_background_and_merge_offline(ctx: ProcessContext, tmp_path: Path) -> None:
    accelerator, net, optimizer = run("ep", seed=1)
    step(accelerator, net, optimizer)
    expected = whole(accelerator, net, optimizer)
    accelerator.save_state(tmp_path / "saved", blocking=False)
    step(accelerator, net, optimizer)
    accelerator.wait_for_saves()
    if ctx.is_main:
        merge(str(tmp_path / "saved"), tmp_path / "merged")
        merged = read_model(tmp_path / "merged")
        assert all(torch.equal(value, expected[f"{name}/weight"]) for name, value in merged.items())
        assert len(merged) == len(list(net.parameters()))
    accelerator.end_training()
