"""Tensor parallelism of models of transformers, by their own plan or a given one: T5, GPT-2, mixtures of experts, few heads of keys.

Each trains like one plain process: AdamW over some steps, float32, 1e-5 on losses of about 3. Weights differ by the order of sums only;
Adam divides by the size of a gradient, so that weights whose gradient is zero but for rounding (biases of keys, which
softmax cancels) may move by a whole step and are compared by the losses alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from hasten import Accelerator
from hasten.config.sections.parallel import ParallelismConfig
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import Pool, ranks
from hasten.testing.toys import seeded
from tests.support.hub_models import (
    GPT2_PLAN,
    GPT_NEO_PLAN,
    T5_PLAN,
    gated_t5,
    gemma,
    gpt2,
    gpt_neo,
    largest_difference,
    llama,
    mixtral,
    share_of,
    step,
    t5,
    train,
)
from tests.support.resharding import ReshardTrial, Run, check_pairs

PRELOAD: Final = ("transformers.modeling_utils",)

MODELS: dict[str, Any] = {
    "t5": t5,
    "gated t5": gated_t5,
    "gpt2": gpt2,
    "mixtral": mixtral,
    "few heads of keys": llama,
    "scaled embedding": gemma,
    "counted heads": gpt_neo,
}
PLANS: dict[str, dict[str, Any]] = {
    "t5": {"tp_plan": T5_PLAN, "tp_divide": ("n_heads", "inner_dim")},
    "gated t5": {"tp_plan": T5_PLAN, "tp_divide": ("n_heads", "inner_dim")},
    "gpt2": {"tp_plan": GPT2_PLAN},
    "counted heads": {"tp_plan": GPT_NEO_PLAN, "tp_divide": ("num_heads",)},
}
"""Plans of the models that carry none."""
LARGEST_SHARE = {
    "t5": (0.60, 0.40),
    "gated t5": (0.60, 0.40),
    "gpt2": (0.60, 0.41),
    "mixtral": (0.53, 0.33),
    "few heads of keys": (0.56, 0.34),
    "scaled embedding": (0.55, 0.42),
    "counted heads": (0.62, 0.45),
}
"""Of the model's bytes, on one of two and one of four ranks: norms and small tables are whole."""


def check_like_plain(name: str, sizes: dict[str, Any], largest: float) -> None:
    build = MODELS[name]
    plain, expected = train(seeded(build))
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(**sizes, **PLANS.get(name, {}))
    )
    net, losses = train(seeded(build), accelerator)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert share_of(net) < largest
    full_state = accelerator.get_state_dict(net)
    if accelerator.is_main_process:
        of_keys = ("k_proj.bias", "c_attn.bias")  # see above
        assert (
            largest_difference(full_state, plain, lambda name: name.endswith(of_keys))
            < 2e-5
        )


@ranks(2)
@pytest.mark.timeout(300)  # the first of these tests imports transformers
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_train_like_plain_torch(ctx: ProcessContext, name: str) -> None:
    check_like_plain(name, {"tp_size": 2}, LARGEST_SHARE[name][0])


@ranks(4)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n == "mixtral" else pytest.mark.exhaustive)
        for n in MODELS
        if n != "few heads of keys"
    ],
)
def test_four_ranks_train_like_plain_torch(ctx: ProcessContext, name: str) -> None:
    check_like_plain(name, {"tp_size": 4}, LARGEST_SHARE[name][1])


@ranks(4)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", ["gpt2", "mixtral", pytest.param("t5", marks=pytest.mark.exhaustive)]
)
def test_shards_of_split_layers_train_like_plain_torch(
    ctx: ProcessContext, name: str
) -> None:
    check_like_plain(
        name, {"tp_size": 2, "dp_shard_size": 2}, LARGEST_SHARE[name][0] / 1.5
    )


def begin(layout: str, seed: int) -> Run:
    name, _, size = layout.partition(" on ")
    config = ParallelismConfig(tp_size=int(size), **PLANS.get(name, {}))
    accelerator = (
        Accelerator(parallelism_config=config) if size != "1" else Accelerator()
    )
    net: nn.Module = seeded(MODELS[name], seed)
    net, optimizer = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=0.05)
    )
    return accelerator, net, optimizer


def update(accelerator: Accelerator, net: nn.Module, optimizer: Optimizer) -> None:
    step(net, optimizer, torch.Generator().manual_seed(1), accelerator)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "mixtral",
        *(
            pytest.param(n, marks=pytest.mark.exhaustive)
            for n in ("t5", "few heads of keys")
        ),
    ],
)
def test_checkpoints_move_between_two_ranks_and_one(
    rank_pool: Pool, tmp_path: Path, name: str
) -> None:
    check_pairs(
        rank_pool,
        tmp_path,
        ReshardTrial(begin, update),
        ((f"{name} on 1", 1), (f"{name} on 2", 2)),
    )
