"""Arguments of a model on a Megatron engine, translated for megatron-core: tokens, positions and masks."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from hasten.errors import StepError
from hasten.extensions.megatron.families import ModelFacts
from hasten.extensions.megatron.settings import MegatronLMPlugin

IGNORED: Final = -100
_SUPPORTED_ARGUMENTS: Final = MappingProxyType[str, tuple[str, ...]](
    {
        "gpt2": ("input_ids", "attention_mask", "position_ids", "labels"),
        "llama": ("input_ids", "attention_mask", "labels"),
    }
)


class CallTensors(dict[str, Tensor]):
    """Tensors of a model call, by name."""


# Any: the user's arguments
def tensors_of_call(facts: ModelFacts, values: dict[str, Any]) -> CallTensors:
    """Return the tensors of a call by name.

    Raises: StepError for arguments that the engine would ignore, or without tokens.
    """
    passed_values = {name: value for name, value in values.items() if value is not None}
    supported_names = _SUPPORTED_ARGUMENTS[facts.family]
    unsupported_names = sorted(
        passed_values.keys() - {*supported_names, "return_dict", "use_cache"}
    )
    if unsupported_names:
        raise StepError(
            f"the model was called with {unsupported_names}, which the engine's layers do not support; pass only {', '.join(supported_names)}."
        )
    if "input_ids" not in passed_values:
        raise StepError(
            f"the model was called without input_ids, which a {facts.family} model needs; pass input_ids."
        )
    return CallTensors(
        (name, passed_values[name]) for name in supported_names if name in passed_values
    )


def check_lengths(
    tensors: CallTensors, facts: ModelFacts, plugin: MegatronLMPlugin
) -> None:
    """Raise StepError unless the lengths of the sequences fit the model and the settings."""
    length = tensors["input_ids"].shape[1]
    if plugin.seq_length not in (None, length):
        raise StepError(
            f"a batch has sequences of {length} tokens, and megatron.seq_length={plugin.seq_length}; pad to that length, or remove the "
            "setting."
        )
    num_parts = plugin.tp_degree
    if plugin.sequence_parallelism and length % num_parts:
        raise StepError(
            f"a batch has sequences of {length} tokens, which megatron.sequence_parallelism=True divides into {num_parts} equal parts; pad "
            f"to a multiple of {num_parts}."
        )
    if length > facts.positions:
        raise StepError(
            f"a batch has sequences of {length} tokens, but the model has only {facts.positions} positions; truncate the sequences."
        )


def engine_arguments(tensors: CallTensors) -> tuple[Tensor, ...]:
    """Return the arguments of megatron-core's model: tokens, positions, and a mask that is True for hidden keys."""
    tokens = tensors["input_ids"]
    rows, length = tokens.shape
    positions = tensors.get("position_ids")
    if positions is None:
        positions = torch.arange(length, device=tokens.device).expand(rows, length)
    return tokens, positions, _hidden_key_mask(tokens, tensors.get("attention_mask"))


def _hidden_key_mask(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Return a mask of keys hidden from each token: those of later tokens and of padding."""
    length = tokens.shape[1]
    is_later = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(
        1
    )[None, None]
    return is_later if mask is None else is_later | (mask == 0)[:, None, None, :]


def next_tokens_of(labels: Tensor) -> Tensor:
    """Return the token to predict at each position: the next label."""
    return functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
