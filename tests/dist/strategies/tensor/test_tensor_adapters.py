"""Tensor parallelism of models with adapters of PEFT: LoRA trains like one plain process, and is saved for PEFT alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
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


# Any: options of PEFT
def with_lora(build: Callable[[], nn.Module], **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base_model: Any = build()
    lora_config = LoraConfig(r=2, init_lora_weights=False, **options)
    return get_peft_model(base_model, lora_config)


PLANS: dict[str, dict[str, Any]] = {
    "gpt2": {"tp_plan": GPT2_PLAN},
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
}


@ranks(2, exhaustive=(4,))
@pytest.mark.timeout(300)  # the first of these tests imports transformers and peft
@pytest.mark.parametrize("name", CASES)
def test_lora_trains_like_plain_torch(ctx: ProcessContext, name: str) -> None:
    build, options = CASES[name]
    num_ranks = ctx.world.size
    if name == "llama" and num_ranks == 4:
        build = lambda: llama(4)  # noqa: E731  # as many heads of keys as ranks
    plain_model, expected_losses = train(with_lora(build, **options))
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(tp_size=num_ranks, **PLANS.get(name, {}))
    )
    model, losses = train(with_lora(build, **options), accelerator)
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    assert share_of(model) < 0.4 + 0.5 / num_ranks
    whole_weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        assert largest_difference(whole_weights, plain_model) < 2e-5


@ranks(2)
@pytest.mark.timeout(300)
def test_lora_dropout_leaves_whole_weights_equal(ctx: ProcessContext) -> None:
    """A whole input must lose the same elements on all ranks: else each would learn a matrix A of its own."""
    accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2))
    model, _ = train(
        with_lora(lambda: llama(2), target_modules="all-linear", lora_dropout=0.3),
        accelerator,
    )
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            copies = accelerator.ctx.world.all_gather_object(parameter.detach())
            assert torch.equal(copies[0], copies[1]), f"{name} differs between ranks"


@ranks(2)
@pytest.mark.timeout(300)
def test_an_adapter_is_saved_alone_for_one_process(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    from peft import PeftModel

    options: dict[str, Any] = {"target_modules": "all-linear"}
    accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2))
    model, _ = train(with_lora(lambda: llama(2), **options), accelerator)
    whole_weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        peft_model: Any = accelerator.unwrap_model(model)
        peft_model.save_pretrained(tmp_path / "adapter", state_dict=whole_weights)
        torch.manual_seed(0)
        base_model: Any = llama(2)
        loaded_model = PeftModel.from_pretrained(base_model, tmp_path / "adapter")
        assert largest_difference(whole_weights, loaded_model) == 0
    accelerator.wait_for_everyone()


@ranks(2)
@pytest.mark.timeout(300)
def test_another_adapter_is_refused_and_the_remedy_works(ctx: ProcessContext) -> None:
    def prepare_with(**options: Any) -> None:
        accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2))
        train(with_lora(lambda: llama(2), **options), accelerator)

    with pytest.raises(ConfigError, match="Leave this layer out of the adapter's"):
        prepare_with(target_modules=["q_proj"], use_dora=True)
    with pytest.raises(ConfigError, match="Leave this layer out of the adapter's"):
        prepare_with(target_modules=["embed_tokens", "q_proj"])
    prepare_with(target_modules=["q_proj"])
