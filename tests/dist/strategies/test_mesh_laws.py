"""Every combination of axes trains a language model and an encoder-decoder like one plain process.

One run goes through accumulation 1 and 3, each without and with clipping. Tolerances with AdamW: float32 differs from plain torch
by the order of sums only (1e-5 on a loss of 3); bf16 keeps 8 bits of every product and the reference is float32 (5e-2).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final, get_args

import pytest
import torch
from torch import Tensor, nn

from hasten import (
    Accelerator,
    ParallelismConfig,
    PipelineParallelConfig,
    TorchContextParallelConfig,
)
from hasten.config.sections.parallel import PipelineSchedule
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.testing.toys import TinyLM, next_token_loss, seeded
from tests.support.toys import TINY_LM_PLAN, TinyMixture, TinyTranslator
from tests.support.training import (
    Batch,
    OnePass,
    Task,
    forward_then_backward,
    hasten_losses,
    over_parts,
    plain_losses,
    through_stages,
)

VOCAB: Final = 16
ROWS: Final = 24
Sizes = dict[str, Any]  # Any: keywords of ParallelismConfig


def random_tokens(steps: int, length: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (ROWS, length), generator=g) for _ in range(steps)]


def places(length: int) -> Tensor:
    return torch.arange(length).repeat(ROWS, 1)


def text_batches(steps: int) -> list[Batch]:
    return [
        (tokens[:, :8], tokens[:, 1:], places(8)) for tokens in random_tokens(steps, 9)
    ]


def text_loss(net: nn.Module, batch: Batch) -> Tensor:
    tokens, labels, positions = batch
    return next_token_loss(net(tokens, positions).float(), labels)


def pair_batches(steps: int) -> list[Batch]:
    """Sources of 12 tokens, targets of 8."""
    return [
        (tokens[:, :12], tokens[:, 12:20], tokens[:, 13:], places(12), places(8))
        for tokens in random_tokens(steps, 21)
    ]


def pair_loss(net: nn.Module, batch: Batch) -> Tensor:
    source, target, labels, source_positions, target_positions = batch
    return next_token_loss(
        net(source, target, source_positions, target_positions).float(), labels
    )


def mixed_text_loss(net: nn.Module, batch: Batch) -> Tensor:
    return next_token_loss(net(batch[0]).float(), batch[1])


def text() -> nn.Module:
    return seeded(lambda: TinyLM(vocab=VOCAB, width=8, heads=4, depth=4, context=8))


def translator(experts: int = 0) -> nn.Module:
    return seeded(lambda: TinyTranslator(vocab=VOCAB, experts=experts))


TASKS: Final = MappingProxyType(
    {
        "text": Task(text, text_batches, text_loss),
        "translator": Task(translator, pair_batches, pair_loss),
        "text of experts": Task(
            lambda: seeded(lambda: TinyMixture(vocab=VOCAB)),
            text_batches,
            mixed_text_loss,
        ),
        "translator of experts": Task(lambda: translator(4), pair_batches, pair_loss),
    }
)


def along(comm_strategy: Any) -> Sizes:  # Any: a literal of the setting
    return {"cp_handler": TorchContextParallelConfig(cp_comm_strategy=comm_strategy)}


def staged(schedule: PipelineSchedule) -> Sizes:
    return {"pp_size": 2, "pp_handler": PipelineParallelConfig(schedule=schedule)}


ON_TWO: Final = MappingProxyType[str, Sizes](
    {
        "tp": {"tp_size": 2},
        "cp allgather": {"cp_size": 2, **along("allgather")},
        "cp ulysses": {"cp_size": 2, **along("ulysses")},
        **{
            f"pp {schedule}": staged(schedule)
            for schedule in get_args(PipelineSchedule)
        },
        "ep": {"ep_size": 2},
        "ep in shards": {"ep_size": 2, "dp_shard_size": 2},
    }
)
ON_FOUR: Final = MappingProxyType[str, Sizes](
    {
        "tp in copies": {"tp_size": 2, "dp_replicate_size": 2},
        "tp in shards": {"tp_size": 2, "dp_shard_size": 2},
        "cp in shards": {"cp_size": 2, "dp_shard_size": 2, **along("allgather")},
        "pp in shards": {"dp_shard_size": 2, **staged("1f1b")},
        "pp of tp": {"tp_size": 2, **staged("1f1b")},
    }
)


def check(
    sizes: Sizes, model: str, precision: str, steps: int, tolerance: float
) -> None:
    task = TASKS[f"{model} of experts" if "ep_size" in sizes else model]
    one_pass: OnePass = forward_then_backward
    if "pp_size" in sizes:
        one_pass = through_stages
    elif "cp_size" in sizes:
        one_pass = over_parts
    plan: Sizes = {"tp_plan": TINY_LM_PLAN} if "tp_size" in sizes else {}
    config = ParallelismConfig(**sizes, **plan)
    accelerator = Accelerator(mixed_precision=precision, parallelism_config=config)
    actual_losses = torch.tensor(hasten_losses(accelerator, task, steps, one_pass))
    torch.testing.assert_close(
        actual_losses, torch.tensor(plain_losses(task, steps)), rtol=0, atol=tolerance
    )


def check_precisions(sizes: Sizes, model: str) -> None:
    for precision, steps, tolerance in (("no", 20, 1e-5), ("bf16", 4, 5e-2)):
        check(sizes, model, precision, steps, tolerance)


@ranks(2)
@pytest.mark.parametrize("layout", ["tp", "cp ulysses", "pp 1f1b", "ep in shards"])
def test_each_axis_trains_an_encoder_decoder_like_plain_torch(
    ctx: ProcessContext, layout: str
) -> None:
    check(ON_TWO[layout], "translator", "no", 8, 1e-5)


@ranks(2)
@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["text", "translator"])
@pytest.mark.parametrize("layout", ON_TWO)
def test_each_axis_trains_like_plain_torch(
    ctx: ProcessContext, layout: str, model: str
) -> None:
    check_precisions(ON_TWO[layout], model)


@ranks(4)
@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["text", "translator"])
@pytest.mark.parametrize("layout", ON_FOUR)
def test_axes_together_train_like_plain_torch(
    ctx: ProcessContext, layout: str, model: str
) -> None:
    check_precisions(ON_FOUR[layout], model)
