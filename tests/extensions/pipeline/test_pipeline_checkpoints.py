"""Checkpoints of pipeline stages: saved on one mesh, loaded on any other, bit for bit; whole weights; open windows."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten import Accelerator, ParallelismConfig, PipelineParallelConfig
from hasten.checkpoint.export import read_model
from hasten.extensions.checkpoint_tools.inspect import merge_shards
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import Pool, ranks
from hasten.testing.toys import TinyLM, next_token_loss, seeded
from tests.support.resharding import ReshardTrial, Run, State, check_pairs, held, joined

ZBV: Final = PipelineParallelConfig(schedule="zbv_zero_bubble")
SETTINGS: Final = MappingProxyType[str, dict[str, Any]](
    {
        "one": {},
        "fsdp": {"strategy": "fsdp"},
        "pp": {"parallelism_config": ParallelismConfig(pp_size=2)},
        "pp in a V": {
            "parallelism_config": ParallelismConfig(pp_size=2, pp_handler=ZBV)
        },
        "pp+ddp": {
            "parallelism_config": ParallelismConfig(pp_size=2, dp_replicate_size=2)
        },
        "pp+fsdp": {
            "parallelism_config": ParallelismConfig(pp_size=2, dp_shard_size=2)
        },
        "pp+tp": {"parallelism_config": ParallelismConfig(pp_size=2, tp_size=2)},
    }
)
FEW: Final = (("one", 1), ("pp", 2), ("pp+ddp", 4))
ALL: Final = (*FEW, ("fsdp", 2), ("pp in a V", 2), ("pp+fsdp", 4), ("pp+tp", 4))
BATCH: Final = 8


def loss_of(net: nn.Module, batch: Tensor) -> Tensor:
    return next_token_loss(net(batch), batch)


def run(layout: str, seed: int, tied: bool = True) -> Run:
    accelerator = Accelerator(**SETTINGS[layout])
    net: nn.Module = seeded(
        lambda: TinyLM(vocab=12, width=8, heads=2, depth=4, context=6, tied=tied), seed
    )
    groups = [
        {"params": [p for p in net.parameters() if p.ndim > 1]},
        {"params": [p for p in net.parameters() if p.ndim < 2]},
    ]
    net, optimizer = accelerator.prepare(
        net, torch.optim.AdamW(groups, lr=0.05, foreach=True)
    )
    return accelerator, net, optimizer


def step(accelerator: Accelerator, net: nn.Module, optimizer: Optimizer) -> None:
    accelerator.forward_backward(
        net, torch.arange(BATCH * 6).reshape(BATCH, 6) % 11, loss_of
    )
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.timeout(600)  # all of them: minutes
@pytest.mark.parametrize(
    "layouts",
    [FEW, pytest.param(ALL, marks=pytest.mark.exhaustive)],
    ids=["few", "all"],
)
def test_every_pair_with_a_pipeline_is_bitwise_equal(
    rank_pool: Pool, tmp_path: Path, layouts: tuple[tuple[str, int], ...]
) -> None:
    check_pairs(rank_pool, tmp_path, ReshardTrial(run, step), layouts, among="pp")


def half_a_window(ctx: ProcessContext, folder: Path, resume: bool) -> State:
    """Two micro-steps of one window, with a save between them, which `resume` repeats from its beginning."""
    accelerator, net, optimizer = run("pp", seed=1)
    accelerator.gradient_accumulation_steps = 2
    batches = [torch.arange(k, BATCH * 6 + k).reshape(BATCH, 6) % 11 for k in range(2)]
    for number, batch in enumerate(batches):
        if resume and number == 0:
            accelerator.load_state(folder)
        with accelerator.accumulate(net):
            accelerator.forward_backward(net, batch, loss_of)
            optimizer.step()
            optimizer.zero_grad()
        if not resume and number == 0:
            accelerator.save_state(folder)
    return held(accelerator, net, optimizer)


def test_a_window_is_repeated_from_a_save_inside_it(
    rank_pool: Pool, tmp_path: Path
) -> None:
    straight = joined(rank_pool.run(half_a_window, 2, tmp_path / "half", False))
    resumed = joined(rank_pool.run(half_a_window, 2, tmp_path / "half", True))
    assert all(torch.equal(value, resumed[name]) for name, value in straight.items())


@ranks(2)
def test_stages_save_in_the_background_and_merge_offline(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    accelerator, net, optimizer = run("pp", seed=1)
    step(accelerator, net, optimizer)
    # a view of live weights
    full_state = {
        name: value.clone() for name, value in accelerator.get_state_dict(net).items()
    }
    accelerator.save_state(tmp_path / "saved", blocking=False)
    step(accelerator, net, optimizer)
    accelerator.wait_for_saves()
    if ctx.is_main:
        merge_shards(str(tmp_path / "saved"), tmp_path / "merged")
        merged = read_model(tmp_path / "merged")
        assert merged.keys() == full_state.keys()
        assert all(torch.equal(merged[name], full_state[name]) for name in full_state)
    accelerator.end_training()
