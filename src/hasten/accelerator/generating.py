"""Text generation with a prepared model, replicated or sharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hasten.errors import ArgumentError
from hasten.modules.names import is_dtensor


def generate(
    model: nn.Module,
    batch: Tensor | Mapping[str, Any],
    num_processes: int,
    options: Mapping[str, Any],
) -> Tensor:  # Any: inputs of the model, and options of its generate()
    """Return the tokens that the model's `generate` produces for this rank's prompts, prompts included.

    Ranks of a sharded model continue until the last of them has finished, because each forward needs all of them.
    Raises: ArgumentError for a model without `generate`, or a batch without `input_ids`.
    """
    if not callable(generate_method := getattr(model, "generate", None)):
        raise ArgumentError(
            f"generate(model) was given a {type(model).__name__}, which has no generate() method, so there is nothing to run; "
            "give a model with text generation, such as a causal language model of transformers."
        )
    model_inputs = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
    model_inputs.pop("labels", None)
    if (
        "input_ids" not in model_inputs
        and "inputs" not in model_inputs
        and "inputs_embeds" not in model_inputs
    ):
        raise ArgumentError(
            f"generate(batch) has the fields {sorted(model_inputs)} and no 'input_ids', the prompts; give the tokens, or a batch that "
            "holds them."
        )
    method_options = dict(options)
    if num_processes > 1 and any(
        is_dtensor(parameter) for parameter in model.parameters()
    ):
        method_options.setdefault("synced_gpus", True)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            generated = generate_method(**model_inputs, **method_options)
    finally:
        model.train(was_training)
    tokens: Tensor = generated if isinstance(generated, Tensor) else generated.sequences
    return tokens


# Any: options of generate()
def padding_token(model: nn.Module, options: Mapping[str, Any]) -> int:
    """Return the token that fills rows which are shorter than the longest of all ranks."""
    settings = options.get(
        "generation_config", getattr(model, "generation_config", None)
    )
    for name in ("pad_token_id", "eos_token_id"):
        token_id = options.get(name, getattr(settings, name, None))
        if isinstance(token_id, list | tuple) and token_id:
            token_id = token_id[0]
        else:
            token_id = token_id
        if isinstance(token_id, int):
            return token_id
    return 0
