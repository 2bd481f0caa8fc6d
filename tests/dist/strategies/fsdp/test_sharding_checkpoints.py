"""Saved on one layout, loaded on another: every pair of layouts on 1, 2 and 4 ranks, bitwise, optimizer included."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from hasten import Accelerator, ProjectConfiguration
from hasten.config.sections.parallel import (
    ParallelismConfig,
    TorchContextParallelConfig,
)
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import Pool, ranks
from hasten.testing.toys import TinyLM, next_token_loss, seeded
from tests.support.resharding import ReshardTrial, Run, check_pairs, held

FEW: Final = (("auto 1", 1), ("fsdp 2", 2), ("tp+fsdp", 4))
MESHES: Final = (
    ("auto 1", 1),
    ("auto 2", 2),
    ("fsdp 4", 4),
    ("tp+fsdp", 4),
    ("pp+tp", 4),
    ("cp+fsdp", 4),
)
ALL: Final = (
    *MESHES,
    ("auto 4", 4),
    ("fsdp 1", 1),
    ("fsdp 2", 2),
    ("tp", 2),
    ("tp+ddp", 4),
)
SETTINGS: Final = MappingProxyType[str, dict[str, Any]](
    {
        "pp+tp": {"parallelism_config": ParallelismConfig(pp_size=2, tp_size=2)},
        "hsdp": {
            "strategy": "fsdp",
            "parallelism_config": ParallelismConfig(
                dp_replicate_size=2, dp_shard_size=2
            ),
        },
        "tp": {"parallelism_config": ParallelismConfig(tp_size=2)},
        "tp+fsdp": {
            "parallelism_config": ParallelismConfig(tp_size=2, dp_shard_size=2)
        },
        "tp+ddp": {
            "parallelism_config": ParallelismConfig(tp_size=2, dp_replicate_size=2)
        },
        "cp+fsdp": {
            "parallelism_config": ParallelismConfig(
                cp_size=2,
                dp_shard_size=2,
                cp_handler=TorchContextParallelConfig(cp_comm_strategy="ulysses"),
            )
        },
    }
)


def run(layout: str, seed: int) -> Run:
    accelerator = Accelerator(
        **SETTINGS.get(layout, {"strategy": layout.partition(" ")[0]})
    )
    net: nn.Module = seeded(
        lambda: TinyLM(vocab=11, width=8, heads=2, depth=2, context=6, tied=True), seed
    )
    net, optimizer = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=0.05, foreach=True)
    )
    return accelerator, net, optimizer


def step(accelerator: Accelerator, net: nn.Module, optimizer: Optimizer) -> None:
    batch, positions = torch.arange(24).reshape(4, 6) % 11, torch.arange(6)
    with accelerator.context_parallel([batch, positions], [1, 0]):
        accelerator.forward_backward(
            net,
            (batch, positions),
            lambda net, inputs: next_token_loss(net(*inputs), inputs[0]),
        )
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(FEW, id="few"),
        pytest.param(MESHES, id="meshes", marks=pytest.mark.exhaustive),
        pytest.param(ALL, id="all", marks=pytest.mark.exhaustive),
    ],
)
def test_every_pair_of_layouts_is_bitwise_equal(
    rank_pool: Pool, tmp_path: Path, layouts: tuple[tuple[str, int], ...]
) -> None:
    check_pairs(rank_pool, tmp_path, ReshardTrial(run, step), layouts)


@ranks(2)
def test_sharded_saves_in_the_background(ctx: ProcessContext, tmp_path: Path) -> None:
    """What is saved is the state at the call, whatever the next steps do to it."""
    accelerator, net, optimizer = run("fsdp", seed=1)
    step(accelerator, net, optimizer)
    expected = held(accelerator, net, optimizer)
    accelerator.save_state(tmp_path / "one", blocking=False)
    step(accelerator, net, optimizer)
    accelerator.wait_for_saves()
    accelerator.load_state(tmp_path / "one")
    state = held(accelerator, net, optimizer)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    accelerator.end_training()


@ranks(4)
@pytest.mark.parametrize("layout", ["hsdp", "fsdp", "tp+ddp"])
def test_each_machine_saves_what_it_needs_on_a_disk_of_its_own(
    ctx: ProcessContext, tmp_path: Path, layout: str
) -> None:
    topology = replace(
        ctx.topology,
        node_rank=ctx.rank // 2,
        local_rank=ctx.rank % 2,
        local_world_size=2,
    )
    project = ProjectConfiguration(
        project_dir=str(tmp_path / f"disk{topology.node_rank}"), save_on_each_node=True
    )
    settings = SETTINGS.get(layout, {"strategy": layout})
    meshed = replace(Accelerator(**settings).ctx, topology=topology)

    def begun(seed: int) -> Run:
        accelerator = Accelerator(context=meshed, project_config=project, **settings)
        net: nn.Module = seeded(
            lambda: TinyLM(vocab=11, width=8, heads=2, depth=2, context=6, tied=True),
            seed,
        )
        net, optimizer = accelerator.prepare(
            net, torch.optim.AdamW(net.parameters(), lr=0.05, foreach=True)
        )
        return accelerator, net, optimizer

    first = begun(1)
    step(*first)
    expected = held(*first)
    first[0].save_state()
    second = begun(2)
    second[0].load_state()
    state = held(*second)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
