"""What a model on a Megatron engine is called with, and the attention of hasten's own inside its layers; without megatron-core."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest
import torch

from hasten.errors import StepError
from hasten.extensions.megatron.call import (
    CallTensors,
    check_lengths,
    engine_arguments,
    next_tokens_of,
    tensors_of_call,
)
from hasten.extensions.megatron.families import Family, ModelFacts
from hasten.extensions.megatron.settings import MegatronLMPlugin

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
TOKENS: Final = torch.arange(1, 9).expand(2, 8)


def of(family: Family, **changes: Any) -> ModelFacts:
    return replace(FACTS, family=family, **changes)


@pytest.mark.parametrize(
    ("family", "changed_inputs", "words"),
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
    family: Family, changed_inputs: dict[str, Any], words: str
) -> None:
    with pytest.raises(StepError, match=words):
        tensors_of_call(
            of(family), {"input_ids": TOKENS, "use_cache": False, **changed_inputs}
        )


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
    call = CallTensors(input_ids=TOKENS)
    check_lengths(call, of(family), MegatronLMPlugin())
    with pytest.raises(StepError, match=words):
        check_lengths(call, of(family), replace(MegatronLMPlugin(), **settings))


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
        CallTensors(input_ids=tokens, attention_mask=mask)
    )
    assert positions.tolist() == [[0, 1, 2]]
    assert blocked[0, 0].int().tolist() == [[0, 1, 1], [0, 0, 1], [0, 0, 1]]


def test_each_token_predicts_the_next_label() -> None:
    labels = torch.tensor([[3, 4, 5]])
    assert next_tokens_of(labels).tolist() == [[4, 5, -100]]


# ---------------------------------------------------------------- attention
