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
from hasten.strategies.context.sequence_plan import SequenceLayout

IGNORED: Final = -100
_TAKES: Final = MappingProxyType[str, tuple[str, ...]](
    {
        "gpt2": ("input_ids", "attention_mask", "position_ids", "labels"),
        "llama": ("input_ids", "attention_mask", "labels"),
        "mixtral": ("input_ids", "attention_mask", "labels"),
    }
)


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
    return Given((name, passed[name]) for name in takes if name in passed)


def check_lengths(given: Given, facts: ModelFacts, plugin: MegatronLMPlugin) -> None:
    """Raise StepError unless the lengths of the sequences fit the model and the settings."""
    length = given["input_ids"].shape[1]
    if plugin.seq_length not in (None, length):
        raise StepError(
            f"a batch has sequences of {length} tokens, and megatron.seq_length={plugin.seq_length}; pad to that length, or remove the "
            "setting."
        )
    shares = plugin.tp_degree * plugin.context_parallel_size
    if plugin.sequence_parallelism and length % shares:
        raise StepError(
            f"a batch has sequences of {length} tokens, which megatron.sequence_parallelism=True divides into {shares} equal parts; pad "
            f"to a multiple of {shares}."
        )
    if length > facts.positions:
        raise StepError(
            f"a batch has sequences of {length} tokens, but the model has only {facts.positions} positions; truncate the sequences."
        )


def arguments(given: Given, layout: SequenceLayout, rank: int) -> tuple[Tensor | None, ...]:
    """Return the arguments of megatron-core's model, for the shard of context-parallel rank `rank`."""
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


def targets(labels: Tensor) -> Tensor:
    """Return the token to predict at each position: the next label."""
    return functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
