"""Models of transformers generate the same tokens under FSDP2 as on one process, decoders and encoder-decoders."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from hasten import Accelerator
from hasten.config.sections.parallel import FullyShardedDataParallelPlugin
from hasten.optional import available
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.testing.toys import seeded
from tests.support import hub_models

pytestmark = pytest.mark.skipif(
    not available("transformers"), reason="transformers is not installed"
)

NUM_NEW_TOKENS: Final = 4
Inputs = dict[str, Tensor]


def text(seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, 16, (2, 4), generator=generator)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def speech(seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    return {"input_features": torch.randn(2, 8, 16, generator=generator)}


MODELS: Final = MappingProxyType[
    str, tuple[Callable[[], nn.Module], Callable[[int], Inputs]]
](
    {
        "llama": (hub_models.llama, text),
        "t5": (hub_models.t5, text),
        "whisper": (hub_models.whisper, speech),
    }
)


def generate(model: Any, inputs: Inputs) -> Tensor:  # Any: a model of transformers
    tokens: Tensor = model.generate(
        **inputs,
        max_new_tokens=NUM_NEW_TOKENS,
        min_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
    )
    return tokens


def train(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Inputs,
) -> None:
    labels = torch.arange(8).reshape(2, 4) % 16
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "FSDP2-wrapped module"
        )  # T5's blocks return views, and nothing changes these in place
        loss = model(**inputs, labels=labels).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


@ranks(1, 2)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_sharded_models_generate_as_one_process_does(
    ctx: ProcessContext, name: str, checkpointing: bool
) -> None:
    build, inputs_of = MODELS[name]
    inputs = inputs_of(0)
    plain: Any = seeded(build)  # Any: a model of transformers
    plain.eval()
    expected = generate(plain, inputs)
    for resharding in (True, False):
        plugin = FullyShardedDataParallelPlugin(
            reshard_after_forward=resharding, activation_checkpointing=checkpointing
        )
        accelerator = Accelerator(fsdp_plugin=plugin)
        model: Any = seeded(build)
        model, optimizer = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1)
        )
        average = accelerator.ema(model, decay=0.0)
        model.eval()
        assert torch.equal(generate(model, inputs), expected), "before any forward"
        model.train()
        train(accelerator, model, optimizer, inputs)
        model.eval()
        trained = generate(model, inputs)
        plain_copy: Any = seeded(build)
        plain_copy.load_state_dict(
            accelerator.ctx.world.broadcast_object(accelerator.get_state_dict(model))
        )
        plain_copy.eval()
        assert torch.equal(trained, generate(plain_copy, inputs)), "after an update"
        with average.swapped():
            assert torch.equal(generate(model, inputs), trained), (
                "decay=0 averages to the weights"
            )
        train(accelerator, model, optimizer, inputs)
