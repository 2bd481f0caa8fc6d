"""Arguments of a model on a Megatron engine, translated for megatron-core: tokens, positions and masks."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final, assert_never

import torch
from torch import Tensor
from torch.nn import functional

from hasten.config.sections.engines import MegatronLMPlugin
from hasten.errors import StepError
from hasten.strategies.context.sequence_plan import SequenceLayout
from hasten.strategies.engines.megatron.families import ModelFacts

IGNORED: Final = -100
_TAKES: Final = MappingProxyType[str, tuple[str, ...]](
    {
        "gpt2": ("input_ids", "attention_mask", "position_ids", "labels"),
        "llama": ("input_ids", "attention_mask", "labels"),
        "mixtral": ("input_ids", "attention_mask", "labels"),
        "bert": ("input_ids", "attention_mask", "token_type_ids", "labels"),
        "t5": ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask", "labels"),
    }
)
OUTPUTS: Final = MappingProxyType[str, str](
    {
        "gpt2": "CausalLMOutputWithPast",
        "llama": "CausalLMOutputWithPast",
        "mixtral": "CausalLMOutputWithPast",
        "bert": "MaskedLMOutput",
        "t5": "Seq2SeqLMOutput",
    }
)
"""Output class of transformers, by family."""


class Given(dict[str, Tensor]):
    """Tensors of a model call, by name."""


def given_to(facts: ModelFacts, values: dict[str, Any]) -> Given:  # Any: the user's arguments
    """Return the tensors of a call by name.

    Raises: StepError for arguments that the engine would ignore, or without tokens.
    """
    passed = {name: value for name, value in values.items() if value is not None}
    takes = _TAKES[facts.family]
    unused = sorted(passed.keys() - {*takes, "return_dict", "use_cache"})
    if unused:
        raise StepError(
            f"the model was called with {unused}, which the engine's layers do not support; pass only {', '.join(takes)}."
        )
    if "input_ids" not in passed:
        raise StepError(f"the model was called without input_ids, which a {facts.family} model needs; pass input_ids.")
    found = Given((name, passed[name]) for name in takes if name in passed)
    if facts.family == "t5" and "decoder_input_ids" not in found:
        found["decoder_input_ids"] = _shifted(found.get("labels"), facts)
    return found


def _shifted(labels: Tensor | None, facts: ModelFacts) -> Tensor:
    """Return the decoder's input for predicting the labels: the labels shifted right by one."""
    if labels is None or facts.start_token is None or facts.pad_token is None:
        lacks = "labels" if labels is None else "decoder_start_token_id and pad_token_id in its configuration"
        raise StepError(
            f"the t5 model was called without decoder_input_ids, and they cannot be computed from labels without {lacks}; pass "
            "decoder_input_ids or labels."
        )
    return functional.pad(labels[:, :-1], (1, 0), value=facts.start_token).masked_fill(
        functional.pad(labels[:, :-1] == IGNORED, (1, 0), value=False), facts.pad_token
    )


def check_lengths(given: Given, facts: ModelFacts, plugin: MegatronLMPlugin) -> None:
    """Raise StepError unless the lengths of the sequences fit the model and the settings."""
    length = given["input_ids"].shape[1]
    wanted = {"seq_length": (plugin.seq_length, length), "encoder_seq_length": (plugin.encoder_seq_length, length)}
    if facts.family == "t5":
        wanted["decoder_seq_length"] = (plugin.decoder_seq_length, given["decoder_input_ids"].shape[1])
    for field, (set_, found) in wanted.items():
        if set_ not in (None, found):
            raise StepError(
                f"a batch has sequences of {found} tokens, and megatron.{field}={set_}; pad to that length, or remove the setting."
            )
    shares = plugin.tp_degree * plugin.context_parallel_size
    for found in (length, *((given["decoder_input_ids"].shape[1],) if facts.family == "t5" else ())):
        if plugin.sequence_parallelism and found % shares:
            raise StepError(
                f"a batch has sequences of {found} tokens, which megatron.sequence_parallelism=True divides into {shares} equal parts; pad "
                f"to a multiple of {shares}."
            )
    if facts.positions is not None and length > facts.positions:
        raise StepError(
            f"a batch has sequences of {length} tokens, but the model has only {facts.positions} positions; truncate the sequences."
        )


def arguments(facts: ModelFacts, given: Given, layout: SequenceLayout, rank: int) -> tuple[Tensor | None, ...]:
    """Return the arguments of megatron-core's model, for the shard of context-parallel rank `rank`."""
    tokens, mask = given["input_ids"], given.get("attention_mask")
    match facts.family:
        case "gpt2" | "llama" | "mixtral":
            return _causal(given, layout, rank)
        case "bert":
            types = given.get("token_type_ids", torch.zeros_like(tokens))
            return tokens, torch.ones_like(tokens) if mask is None else mask, types
        case "t5":
            read = given["decoder_input_ids"]
            padding = _padding(tokens, mask)
            return tokens, read, padding, _later(read, given.get("decoder_attention_mask")), padding
        case other:
            assert_never(other)


def _causal(given: Given, layout: SequenceLayout, rank: int) -> tuple[Tensor | None, ...]:
    tokens, mask = given["input_ids"], given.get("attention_mask")
    rows, length = tokens.shape
    positions = given.get("position_ids", torch.arange(length, device=tokens.device).expand(rows, length))
    if layout.ranks == 1:
        return tokens, positions, _later(tokens, mask)
    layout.check(length, "a batch")
    own = torch.tensor(layout.positions(rank, length), device=tokens.device)
    blocked = None if mask is None else _later(tokens, mask)[:, :, own]
    return tokens[:, own], positions[:, own], blocked


def _later(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Return a mask of keys hidden from each token: those of later tokens and of padding."""
    length = tokens.shape[1]
    later = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
    return later if mask is None else later | (mask == 0)[:, None, None, :]


def _padding(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Return a mask of keys hidden from all tokens: those of padding."""
    return (torch.zeros_like(tokens, dtype=torch.bool) if mask is None else mask == 0)[:, None, None, :]


def targets(facts: ModelFacts, labels: Tensor) -> Tensor:
    """Return the token to predict at each position: the label, or the next label for a causal model."""
    return functional.pad(labels[:, 1:], (0, 1), value=IGNORED) if facts.causal else labels
