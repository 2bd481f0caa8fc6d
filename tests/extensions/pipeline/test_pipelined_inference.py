"""A model divided over all ranks for inference gives the outputs of the whole one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hasten import prepare_pipeline
from hasten.errors import ConfigError
from hasten.extensions.pipeline.inference import stage_starts
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.testing.toys import TinyLM, seeded

VOCAB = 16


def lm() -> TinyLM:
    return seeded(lambda: TinyLM(vocab=VOCAB, width=8, heads=2, depth=4, context=6))


@ranks(1, 2)
@pytest.mark.parametrize("gather_output", [True, False])
def test_outputs_are_those_of_the_whole_model(
    ctx: ProcessContext, gather_output: bool
) -> None:
    """Batches of any size, with gradients enabled or not, and no rank holds what another one has."""
    full_model = lm().eval()
    net = prepare_pipeline(
        lm(), num_microbatches=3, gather_output=gather_output, cpu=True
    )
    last = ctx.world.rank == ctx.world.size - 1
    for rows in (7, 3, 1):
        tokens = torch.arange(rows * 6).reshape(rows, 6) % VOCAB
        output = net(tokens)
        if gather_output or last:
            assert not output.requires_grad
            torch.testing.assert_close(
                output, full_model(tokens).detach(), rtol=0, atol=1e-5
            )
        else:
            assert output is None
    stage_names = {name for name, _ in net.named_parameters()}
    everyone = [
        name for names in ctx.world.all_gather_object(stage_names) for name in names
    ]
    assert sorted(everyone) == sorted(name for name, _ in full_model.named_parameters())


@ranks(2)
def test_stages_begin_where_they_are_told_to(ctx: ProcessContext) -> None:
    net = prepare_pipeline(lm(), split_points=["blocks.1"], cpu=True)
    block_numbers = {
        name.split(".")[1]
        for name, _ in net.named_parameters()
        if name.startswith("blocks.")
    }
    assert block_numbers == ({"0"} if ctx.world.rank == 0 else {"1", "2", "3"})
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    torch.testing.assert_close(
        net(tokens), lm().eval()(tokens).detach(), rtol=0, atol=1e-5
    )
    with pytest.raises(ConfigError, match="names 'head'"):
        prepare_pipeline(lm(), split_points=["head"], cpu=True)


@ranks(1, 2)
def test_it_is_told_where_stages_begin_and_what_stays_whole(
    ctx: ProcessContext,
) -> None:
    net = prepare_pipeline(lm(), cpu=True, no_split_module_classes=["Block"])
    assert stage_starts(net) == ([] if ctx.world.size == 1 else ["blocks.2"])
    if ctx.world.size > 1:
        with pytest.raises(
            ConfigError, match=r"names TinyLM, .* inside of 'the model itself'"
        ):
            prepare_pipeline(lm(), cpu=True, no_split_module_classes=["TinyLM"])


@ranks(2)
def test_weights_come_from_rank_0(ctx: ProcessContext) -> None:
    rank_model = lm()
    if ctx.world.rank:
        with torch.no_grad():
            for parameter in rank_model.parameters():
                parameter.zero_()
    net: nn.Module = prepare_pipeline(rank_model, cpu=True)
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    torch.testing.assert_close(
        net(tokens), lm().eval()(tokens).detach(), rtol=0, atol=1e-5
    )
