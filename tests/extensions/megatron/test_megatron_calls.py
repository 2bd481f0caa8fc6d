"""What a model on a Megatron engine is called with, and the attention of hasten's own inside its layers; without megatron-core."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from hasten.errors import ConfigError, StepError
from hasten.extensions.megatron.attention import CoreAttention, layout_of
from hasten.extensions.megatron.call import (
    CallTensors,
    check_lengths,
    engine_arguments,
    next_tokens_of,
    tensors_of_call,
)
from hasten.extensions.megatron.families import Family, ModelFacts
from hasten.extensions.megatron.settings import MegatronLMPlugin
from hasten.strategies.context.attention import in_order

FACTS: Final = ModelFacts(
    family="gpt2",
    layers=2,
    hidden=8,
    heads=2,
    groups=2,
    head_dim=4,
    ffn=16,
    vocab=11,
    positions=8,
    epsilon=1e-5,
    activation="gelu",
    tied=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    init_std=0.02,
)
ALONE: Final = layout_of(1)
TOKENS: Final = torch.arange(1, 9).expand(2, 8)


def of(family: Family, **changes: Any) -> ModelFacts:
    return replace(FACTS, family=family, **changes)


@pytest.mark.parametrize(
    ("family", "given", "words"),
    [
        (
            "llama",
            {"position_ids": TOKENS},
            r"\['position_ids'\].*pass only input_ids, attention_mask, labels\.",
        ),
        ("gpt2", {"token_type_ids": TOKENS}, r"\['token_type_ids'\]"),
        ("gpt2", {"input_ids": None}, "without input_ids, which a gpt2 model needs"),
    ],
)
def test_what_would_be_ignored_is_refused(
    family: Family, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(StepError, match=words):
        tensors_of_call(of(family), {"input_ids": TOKENS, "use_cache": False, **given})


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("gpt2", {"seq_length": 4}, r"of 8 tokens, and megatron\.seq_length=4"),
        (
            "gpt2",
            {"tp_degree": 3, "sequence_parallelism": True},
            "of 8 tokens.*pad to a multiple of 3",
        ),
    ],
)
def test_other_lengths_are_refused(
    family: Family, settings: dict[str, Any], words: str
) -> None:
    given = CallTensors(input_ids=TOKENS)
    check_lengths(given, of(family), MegatronLMPlugin())
    with pytest.raises(StepError, match=words):
        check_lengths(given, of(family), replace(MegatronLMPlugin(), **settings))


def test_a_sequence_longer_than_the_table_of_positions_is_refused() -> None:
    with pytest.raises(
        StepError,
        match="of 8 tokens, but the model has only 7 positions; truncate the sequences",
    ):
        check_lengths(
            CallTensors(input_ids=TOKENS), of("gpt2", positions=7), MegatronLMPlugin()
        )


def test_masks_block_padding_and_what_comes_later() -> None:
    mask = torch.tensor([[1, 1, 0]])
    tokens = torch.tensor([[4, 5, 0]])
    _, positions, blocked = engine_arguments(
        CallTensors(input_ids=tokens, attention_mask=mask), ALONE, 0
    )
    assert positions is not None
    assert blocked is not None
    assert positions.tolist() == [[0, 1, 2]]
    assert blocked[0, 0].int().tolist() == [[0, 1, 1], [0, 0, 1], [0, 0, 1]]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_context_parallel_ranks_hold_every_token_once(ranks: int, masked: bool) -> None:
    layout = layout_of(ranks)
    given = CallTensors(
        input_ids=TOKENS,
        **({"attention_mask": torch.ones_like(TOKENS)} if masked else {}),
    )
    parts = [engine_arguments(given, layout, rank) for rank in range(ranks)]
    whole = engine_arguments(CallTensors(input_ids=TOKENS), ALONE, 0)
    for number, wanted in enumerate(whole[:2]):
        assert wanted is not None
        assert torch.equal(
            in_order(torch.cat([one[number] for one in parts], 1), layout, 1),  # type: ignore[misc]
            wanted,
        )
    if masked:
        rows = torch.cat([one[2] for one in parts], 2)  # type: ignore[misc]
        assert torch.equal(in_order(rows, layout, 2), whole[2].expand(2, 1, 8, 8))  # type: ignore[union-attr]
    else:
        assert all(one[2] is None for one in parts)
    with pytest.raises(ConfigError, match=f"a multiple of {2 * ranks}"):
        engine_arguments(CallTensors(input_ids=TOKENS[:, :7]), layout, 0)


def test_each_token_predicts_the_next_label() -> None:
    labels = torch.tensor([[3, 4, 5]])
    assert next_tokens_of(labels).tolist() == [[4, 5, -100]]


# ---------------------------------------------------------------- attention


def attention(scale: float | None = None) -> CoreAttention:
    config = SimpleNamespace(
        kv_channels=4, attention_dropout=0.0, sequence_parallel=False
    )
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    return CoreAttention(
        config,
        1,
        None,
        "self",
        softmax_scale=scale,
        pg_collection=SimpleNamespace(cp=group),
    )


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("scale", [None, 1.0])
def test_attention_adds_its_bias_and_blocks_its_mask(scale: float | None) -> None:
    """As plain softmax does; keys shared by two heads each."""
    query, key, value, bias = (
        random(5, 3, 4, 4),
        random(6, 3, 2, 4),
        random(6, 3, 2, 4) + 1,
        random(1, 4, 5, 6),
    )
    blocked = torch.rand((3, 1, 5, 6), generator=torch.Generator().manual_seed(1)) < 0.3
    found = attention(scale)(query, key, value, blocked, attention_bias=bias)
    q, k, v = (
        x.permute(1, 2, 0, 3)
        for x in (query, key.repeat_interleave(2, 2), value.repeat_interleave(2, 2))
    )
    scores = q @ k.mT * (0.5 if scale is None else scale) + bias
    expected = scores.masked_fill(blocked, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(found, expected.permute(2, 0, 1, 3).flatten(2))


def test_a_token_that_sees_nothing_stays_finite() -> None:
    """Padding on the left blocks all keys of its own row; its numbers must not spread."""
    query = random(2, 1, 1, 4).requires_grad_()
    blocked = torch.tensor([[True, True], [True, False]])[None, None]
    found = attention()(query, random(2, 1, 1, 4), random(2, 1, 1, 4), blocked)
    found.sum().backward()
    assert found.isfinite().all()
    assert query.grad is not None
    assert query.grad.isfinite().all()


def test_without_a_mask_later_keys_are_not_seen() -> None:
    query, key, value = random(3, 1, 1, 4), random(3, 1, 1, 4), random(3, 1, 1, 4)
    later = torch.ones(3, 3, dtype=torch.bool).triu(1)[None, None]
    torch.testing.assert_close(
        attention()(query, key, value, None), attention()(query, key, value, later)
    )
