"""Checkpoints of divided experts: saved on one mesh, loaded on any other, bit for bit; merged offline."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from hasten import Accelerator, ParallelismConfig
from hasten.checkpoint.export import read_model
from hasten.extensions.checkpoint_tools.inspect import merge_shards
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import Pool, ranks
from hasten.testing.toys import next_token_loss, seeded
from tests.support.resharding import ReshardTrial, Run, check_pairs, held
from tests.support.toys import TinyMixture

SETTINGS: Final = MappingProxyType[str, dict[str, Any]](
    {
        "one": {},
        "ddp": {},
        "fsdp": {"strategy": "fsdp"},
        "ep": {"parallelism_config": ParallelismConfig(ep_size=2)},
        "ep+fsdp": {
            "parallelism_config": ParallelismConfig(ep_size=2, dp_shard_size=2)
        },
        "ep of four": {
            "parallelism_config": ParallelismConfig(ep_size=4, dp_shard_size=4)
        },
        "ep sharded": {
            "parallelism_config": ParallelismConfig(ep_size=2, dp_shard_size=4)
        },
        "ep copied": {"parallelism_config": ParallelismConfig(ep_size=2)},
        "ep hybrid": {
            "parallelism_config": ParallelismConfig(
                ep_size=2, dp_shard_size=2, dp_replicate_size=2
            )
        },
    }
)
FEW: Final = (("one", 1), ("ep", 2), ("ep+fsdp", 2))
FOUR: Final = (("ep of four", 4), ("ep sharded", 4), ("ep copied", 4), ("ep hybrid", 4))
ALL: Final = (*FEW, ("ddp", 2), ("fsdp", 2), *FOUR)


def run(layout: str, seed: int) -> Run:
    accelerator = Accelerator(**SETTINGS[layout])
    net: nn.Module = seeded(lambda: TinyMixture(vocab=12), seed)
    net, optimizer = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=0.05, foreach=True)
    )
    return accelerator, net, optimizer


def step(accelerator: Accelerator, net: nn.Module, optimizer: Optimizer) -> None:
    batch = (
        torch.arange(accelerator.process_index, 24 + accelerator.process_index).reshape(
            4, 6
        )
        % 11
    )
    accelerator.backward(next_token_loss(net(batch), batch))
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.timeout(600)  # all of them: minutes
@pytest.mark.parametrize(
    "layouts",
    [FEW, pytest.param(ALL, marks=pytest.mark.exhaustive)],
    ids=["few", "all"],
)
def test_every_pair_with_experts_is_bitwise_equal(
    rank_pool: Pool, tmp_path: Path, layouts: tuple[tuple[str, int], ...]
) -> None:
    check_pairs(rank_pool, tmp_path, ReshardTrial(run, step), layouts, among="ep")


@ranks(2)
def test_experts_save_in_the_background_and_merge_offline(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    accelerator, net, optimizer = run("ep", seed=1)
    step(accelerator, net, optimizer)
    expected = held(accelerator, net, optimizer)
    accelerator.save_state(tmp_path / "saved", blocking=False)
    step(accelerator, net, optimizer)
    accelerator.wait_for_saves()
    if ctx.is_main:
        merge_shards(str(tmp_path / "saved"), tmp_path / "merged")
        merged = read_model(tmp_path / "merged")
        assert all(
            torch.equal(value, expected[f"{name}/weight"])
            for name, value in merged.items()
        )
        assert len(merged) == len(list(net.parameters()))
    accelerator.end_training()
