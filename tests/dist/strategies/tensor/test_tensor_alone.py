"""Tensor parallel over the whole world: no data-parallel wrapper, and everything that one would take care of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hasten import Accelerator, init_empty_weights
from hasten.config.sections.parallel import ParallelismConfig
from hasten.errors import PrepareError
from hasten.modules.names import is_dtensor
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.testing.toys import TinyLM, next_token_loss, seeded
from tests.support.toys import TINY_LM_PLAN

TOKENS = torch.randint(0, 16, (6, 6), generator=torch.Generator().manual_seed(1))


def built(seed: int = 0) -> TinyLM:
    return seeded(lambda: TinyLM(vocab=16, width=8, heads=4, depth=2, context=6), seed)


def split(ctx: ProcessContext, precision: str = "no") -> Accelerator:
    sizes = ParallelismConfig(tp_size=ctx.world.size, tp_plan=TINY_LM_PLAN)
    accelerator = Accelerator(mixed_precision=precision, parallelism_config=sizes)
    assert accelerator.strategy == "tensor"
    return accelerator


class OwnAdamW(torch.optim.AdamW):
    """A class that torch does not know, as of a package of optimizers."""


@ranks(2, exhaustive=(4,))
@pytest.mark.parametrize("kind", [torch.optim.AdamW, OwnAdamW, torch.optim.SGD])
def test_weights_begin_as_those_of_rank_0_and_are_exported_whole(
    ctx: ProcessContext, kind: Callable[..., torch.optim.Optimizer]
) -> None:
    # the bias of keys has no gradient but rounding, which a small eps would turn into whole steps
    make = (
        partial(kind, lr=0.1)
        if kind is torch.optim.SGD
        else partial(kind, lr=0.1, eps=1e-3)
    )
    accelerator = split(ctx)
    net = built(seed=ctx.rank)
    model, optimizer = accelerator.prepare(net, make(net.parameters()))
    plain = built()
    reference = make(plain.parameters())
    for _ in range(3):
        accelerator.backward(next_token_loss(model(TOKENS), TOKENS))
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        next_token_loss(plain(TOKENS), TOKENS).backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(
            norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        )
        for each_optimizer in (optimizer, reference):
            each_optimizer.step()
            each_optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    assert set(state) == (set(plain.state_dict()) if ctx.is_main else set())
    for name, value in state.items():
        torch.testing.assert_close(
            value, plain.state_dict()[name], rtol=0, atol=1e-5, msg=name
        )


@ranks(2)
def test_meta_weights_are_filled_by_a_load(ctx: ProcessContext, tmp_path: Path) -> None:
    full_model = built(seed=3)
    accelerator = split(ctx)
    source = accelerator.prepare(built(seed=3))
    accelerator.save_model(source, tmp_path)
    with init_empty_weights():
        empty = TinyLM(vocab=16, width=8, heads=4, depth=2, context=6)
    model = split(ctx).prepare(empty)
    assert all(
        parameter.isnan().all()
        for parameter in model.parameters()
        if not is_dtensor(parameter)
    )
    accelerator.load_model(model, tmp_path)
    torch.testing.assert_close(model(TOKENS), full_model(TOKENS))


@ranks(2)
def test_hooks_on_split_parameters_are_called_or_refused(ctx: ProcessContext) -> None:
    are_split: list[bool] = []
    net = built()

    def note(parameter: Tensor) -> None:
        are_split.append(is_dtensor(parameter.grad))

    accelerator = split(ctx)
    model = accelerator.prepare(net)
    model.get_parameter("blocks.0.up.weight").register_post_accumulate_grad_hook(note)
    accelerator.backward(next_token_loss(model(TOKENS), TOKENS))
    assert are_split == [True]
    hooked = built()
    hooked.get_parameter("blocks.0.up.weight").register_hook(lambda grad: grad)  # type: ignore[no-untyped-call]
    with pytest.raises(PrepareError, match="register_hook"):
        split(ctx).prepare(hooked)
