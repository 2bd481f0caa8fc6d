"""Tensor parallelism of models that PEFT has wrapped: LoRA beside split layers, its dropout, its names, and other adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hasten import Accelerator
from hasten.config.sections.parallel import ParallelismConfig
from hasten.errors import ConfigError
from hasten.optional import available
from hasten.runtime.context import ProcessContext
from hasten.strategies.tensor.plan import working_plan
from hasten.testing.pool import ranks
from tests.support.hub_models import (
    GPT2_PLAN,
    T5_PLAN,
    gpt2,
    largest_difference,
    llama,
    share_of,
    t5,
    train,
)

PRELOAD: Final = ("peft",)

pytestmark = pytest.mark.skipif(not available("peft"), reason="peft is not installed")


def with_lora(build: Callable[[], nn.Module], **options: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base: Any = build()
    return get_peft_model(base, LoraConfig(r=2, init_lora_weights=False, **options))


PLANS: dict[str, dict[str, Any]] = {
    "gpt2": {"tp_plan": GPT2_PLAN, "tp_divide": ("num_heads", "split_size")},
    "t5": {"tp_plan": T5_PLAN, "tp_divide": ("n_heads", "inner_dim")},
}
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "gpt2": (
        gpt2,
        {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    ),
    "llama": (
        lambda: llama(2),
        {"target_modules": "all-linear", "modules_to_save": ["lm_head"]},
    ),
    "t5": (t5, {"target_modules": ["q", "v"]}),
    "keys": (
        lambda: llama(4),
        {"target_modules": ["k_proj", "o_proj"], "lora_bias": True},
    ),
    "embedding": (lambda: llama(2), {"target_modules": ["embed_tokens", "q_proj"]}),
}


def check_like_plain(name: str, ranks: int) -> None:
    build, options = CASES[name]
    plain, expected = train(with_lora(build, **options))
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(tp_size=ranks, **PLANS.get(name, {}))
    )
    net, losses = train(with_lora(build, **options), accelerator)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert share_of(net) < 0.4 + 0.5 / ranks
    whole = accelerator.get_state_dict(net)
    if accelerator.is_main_process:
        assert largest_difference(whole, plain) < 2e-5


@ranks(2)
@pytest.mark.timeout(300)  # the first of these tests imports transformers and peft
@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "llama",
        *(pytest.param(n, marks=pytest.mark.exhaustive) for n in list(CASES)[2:]),
    ],
)
def test_lora_on_two_ranks_trains_like_plain_torch(
    ctx: ProcessContext, name: str
) -> None:
    check_like_plain(name, 2)


@ranks(4)
@pytest.mark.timeout(300)
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_lora_on_four_ranks_trains_like_plain_torch(
    ctx: ProcessContext, name: str
) -> None:
    check_like_plain(name, 4)


@ranks(2)
@pytest.mark.timeout(300)
def test_lora_dropout_leaves_the_ranks_equal(ctx: ProcessContext) -> None:
    """A whole input must lose the same elements on all ranks: else each would learn a matrix A of its own."""
    accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2))
    net, _ = train(
        with_lora(lambda: llama(2), target_modules="all-linear", lora_dropout=0.3),
        accelerator,
    )
    for name, parameter in net.named_parameters():
        if not isinstance(parameter, DTensor):
            there = accelerator.ctx.world.all_gather_object(parameter.detach())
            assert torch.equal(there[0], there[1]), f"{name} differs between ranks"


@ranks(2)
@pytest.mark.timeout(300)
def test_other_adapters_are_refused_with_a_plan_that_works(ctx: ProcessContext) -> None:
    from peft import IA3Config, get_peft_model

    def scaled() -> nn.Module:
        torch.manual_seed(0)
        targets: Any = {
            "target_modules": ["k_proj", "v_proj", "down_proj"],
            "feedforward_modules": ["down_proj"],
        }
        base: Any = llama(2)
        return get_peft_model(base, IA3Config(**targets))

    for build in (
        scaled,
        lambda: with_lora(lambda: llama(2), target_modules=["q_proj"], use_dora=True),
    ):
        accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2))
        with pytest.raises(
            ConfigError,
            match=r"an adapter other than plain LoRA.*tp_plan=\{'base_model.model.model.layers.\*.self_attn",
        ) as raised:
            accelerator.prepare(build())
        plan = working_plan(build(), 2)
        assert repr(plan) in str(raised.value)
        _, expected = train(build())
        net, losses = train(
            build(),
            Accelerator(parallelism_config=ParallelismConfig(tp_size=2, tp_plan=plan)),
        )
        assert losses == pytest.approx(expected, abs=1e-5)
        assert share_of(net) < 0.7
