"""Model on a Megatron engine: called like the transformers model it was made from, saved as shards of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hasten.extensions.megatron.call import (
    IGNORED,
    CallTensors,
    check_lengths,
    engine_arguments,
    next_tokens_of,
    tensors_of_call,
)
from hasten.extensions.megatron.engine import BuiltEngine
from hasten.extensions.megatron.families import ModelFacts
from hasten.extensions.megatron.package import (
    Ranks,
    hide_engine_warnings,
    import_megatron,
)
from hasten.extensions.megatron.settings import MegatronLMPlugin
from hasten.extensions.megatron.shard_plan import (
    WORD_EMBEDDINGS,
    ShardLocation,
    locate_shard,
    tensor_entries,
)
from hasten.extensions.megatron.weights import (
    fuse_tensors,
    shard_of_whole,
    slice_of,
    unpadded_shard,
)
from hasten.modules.names import StagePart
from hasten.optional import need


# not an error: ends the loss function on a stage without logits
class StageOutput(Exception):
    """Exception that carries the hidden states of a stage other than the last out of the user's loss function."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the hidden states of a pipeline stage")
        self.hidden = hidden


@dataclass(frozen=True, slots=True)
class Calls:
    """Functions of the strategy that a call of the model needs."""

    through: Callable[..., Any]  # Any: an output of transformers
    """Runs a batch through all pipeline stages."""
    draw: Callable[[], None]
    """Seeds the random numbers of a batch."""


class MegatronModel(nn.Module):
    """This rank's shard of a language model; its parameters have their names of the whole model."""

    def __init__(
        self,
        built: BuiltEngine,
        facts: ModelFacts,
        config: Any,  # Any: the configuration of transformers
        ranks: Ranks,
        plugin: MegatronLMPlugin,
        calls: Calls,
    ) -> None:
        super().__init__()
        self.engine = built.wrapper
        self.built = built
        self.facts = facts
        self.config = config
        self.ranks = ranks
        self.stage_part: StagePart | None = None
        self.hub: dict[str, Tensor] | None = None
        """Whole weights in the Hub layout, while they may be written; None otherwise."""
        self.in_schedule = False
        self._output = need("transformers.modeling_outputs").CausalLMOutputWithPast
        self._plugin = plugin
        self._calls = calls
        self.entries = {entry.name: entry for entry in tensor_entries(facts)}
        self.held = dict(self._parameters_with_global_names())
        """This rank's parameters by their names in the whole model."""
        self._names = {id(parameter): name for name, parameter in self.held.items()}
        for parameter in self.held.values():
            # Any: attributes of megatron-core and of hasten
            marked_parameter: Any = parameter
            marked_parameter.stored_slice = self.to_stored  # read by checkpoints
            marked_parameter.tensor_model_parallel = self.is_split(
                parameter
            )  # megatron-core sets it only when it initialises weights

    def _parameters_with_global_names(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.built.chunk.named_parameters():
            if name.startswith("decoder.layers."):
                stack, layers, layer_index, tensor_name = name.split(".", 3)
                name = f"{stack}.{layers}.{int(layer_index) + self.built.layer_offset}.{tensor_name}"
            elif name == "output_layer.weight" and self.facts.tied:
                name = WORD_EMBEDDINGS  # the copy on the last stage
            yield name, parameter

    # -- for checkpoints and optimizers ---------------------------------------------------------------------------
    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters by their names in the whole model; arguments other than `prefix` are ignored."""
        name_prefix = f"{prefix}." if prefix else ""
        yield from (
            (name_prefix + name, parameter) for name, parameter in self.held.items()
        )

    def state_dict(  # type: ignore[override]
        self, *args: Any, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return the parameters, or whole weights in the Hub layout while those may be written. Any: torch's signature."""
        state = dict(self.held) if self.hub is None else self.hub
        shown_state = {}
        for name, value in state.items():
            shown_state[prefix + name] = value if keep_vars else value.detach()
        return shown_state

    def place_of(self, parameter: Tensor, rank: int | None = None) -> ShardLocation:
        """Return the position in the whole tensor of a rank's shard of a parameter; by default of this rank's shard."""
        own_index, ranks = self.ranks.tp
        split_kind = self.entries[self._names[id(parameter)]].split
        return locate_shard(
            split_kind,
            tuple(parameter.shape),
            own_index if rank is None else rank,
            ranks,
            self.facts.vocab,
        )

    def is_split(self, parameter: Tensor) -> bool:
        """Return whether a parameter is sharded over tensor-parallel ranks."""
        return (
            self.ranks.tp[1] > 1
            and self.entries[self._names[id(parameter)]].split != "whole"
        )

    def writes_shard(self, parameter: Tensor) -> bool:
        """Return whether this rank writes its shard of a parameter into checkpoints."""
        return self.ranks.first and (self.is_split(parameter) or self.ranks.tp[0] == 0)

    def to_stored(
        self, parameter: Tensor
    ) -> Any:  # Any: a slice, as checkpoints store it
        """Return this rank's slice of a parameter, as checkpoints store it."""
        return slice_of(
            parameter, self.place_of(parameter), self.writes_shard(parameter)
        )

    @torch.no_grad()
    def fill_shards(self, hub_weights: dict[str, Tensor]) -> None:
        """Copy this rank's shards from whole weights in the Hub layout. Local."""
        for name, parameter in self.held.items():
            entry = self.entries[name]
            location = self.place_of(parameter)
            if location.size != location.view:
                parameter.zero_()  # rows that pad the vocabulary, never read or trained
            unpadded_shard(parameter.data, location).copy_(
                shard_of_whole(fuse_tensors(entry, hub_weights, self.facts), location)
            )

    # -- calls ----------------------------------------------------------------------------------------------------
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **other_arguments: Any,
    ) -> Any:
        """Return loss and logits like the transformers model; with gradients and labels, the loss only.

        Any: arguments and outputs of transformers.
        Raises: StepError for arguments that the engine would ignore, and for sequences of a wrong length.
        """
        tensors = tensors_of_call(
            self.facts,
            {
                "input_ids": input_ids,
                "attention_mask": attention_mask,
                **other_arguments,
            },
        )
        check_lengths(tensors, self.facts, self._plugin)
        if not self.in_schedule and self.built.config.pipeline_model_parallel_size > 1:
            return self._calls.through(self, tensors)
        if not self.in_schedule and torch.is_grad_enabled():
            self._calls.draw()
        return self.run_layers(tensors)

    def run_layers(self, tensors: CallTensors) -> Any:  # Any: an output of transformers
        """Run this rank's layers. Raises: StageOutput on a stage other than the last."""
        labels = tensors.get("labels")
        with hide_engine_warnings():
            stage_output = self.engine(*engine_arguments(tensors))
            if not self.built.last:
                raise StageOutput(stage_output)
            if isinstance(stage_output, tuple):
                stage_output = stage_output[0]
            else:
                stage_output = stage_output
            logits = self._without_padding(stage_output.float())
            loss = None if labels is None else self._cross_entropy(logits, labels)
            returned_logits = None
            if (
                loss is None
                or not torch.is_grad_enabled()
                or self._plugin.return_logits
            ):
                gather = import_megatron(
                    "tensor_parallel"
                ).gather_from_tensor_model_parallel_region
                returned_logits = gather(logits)[..., : self.facts.vocab]
        return self._output(loss=loss, logits=returned_logits)

    def _without_padding(self, logits: Tensor) -> Tensor:
        """Return the logits with the lowest value in columns that pad the vocabulary."""
        width = logits.shape[-1]
        start_column = logits.shape[-1] * self.ranks.tp[0]
        num_real_columns = max(0, min(width, self.facts.vocab - start_column))
        if num_real_columns == width:
            return logits
        return functional.pad(
            logits[..., :num_real_columns],
            (0, width - num_real_columns),
            value=torch.finfo(logits.dtype).min,
        )

    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy of the tokens to predict, over a vocabulary sharded over ranks."""
        next_tokens = next_tokens_of(labels)
        is_counted = next_tokens != IGNORED
        token_losses: Tensor = import_megatron(
            "tensor_parallel"
        ).vocab_parallel_cross_entropy(logits, next_tokens.clamp(min=0))
        return (token_losses * is_counted).sum() / is_counted.sum()
