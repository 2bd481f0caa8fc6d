"""A model on a Megatron engine: called like the transformers model it was made from, stored in parts of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hasten.errors import StepError
from hasten.modules.stages import StagePart
from hasten.optional import need
from hasten.strategies import megatron_engine
from hasten.strategies.megatron_config import ModelFacts
from hasten.strategies.megatron_engine import Built
from hasten.strategies.megatron_layout import WORDS, Place, entries, place
from hasten.strategies.megatron_weights import box_of, fuse, part_of, slice_of

_IGNORED = -100


class StageOutput(Exception):  # no error: it ends a loss function on a stage that has no logits
    """Carries the hidden states of a stage that is not the last one out of the user's loss function."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the hidden states of a pipeline stage")
        self.hidden = hidden


class MegatronModel(nn.Module):
    """This rank's part of a language model; its parameters have the names they have in the whole one."""

    def __init__(
        self,
        built: Built,
        facts: ModelFacts,
        config: Any,  # Any: the configuration of transformers
        tp: tuple[int, int],
        owned: bool,
        through: Callable[..., Any],
        draw: Callable[[], None],
        seq_length: int | None = None,
    ) -> None:
        super().__init__()
        self.engine = built.wrapper
        self.built = built
        self.facts = facts
        self.config = config
        self.stage_part: StagePart | None = None
        self.hub: dict[str, Tensor] | None = None
        """Whole weights in the Hub layout, while they may be written."""
        self.in_schedule = False
        self._output = need("transformers.modeling_outputs").CausalLMOutputWithPast
        self.tp = tp
        """This rank's number among tensor parallel ranks, and how many there are."""
        self._owned, self._seq_length = owned, seq_length
        self._through, self._draw = through, draw
        self.entries = {entry.name: entry for entry in entries(facts)}
        self.held = dict(self._named())
        """This rank's parameters by their names in the whole model."""
        self._names = {id(parameter): name for name, parameter in self.held.items()}
        for parameter in self.held.values():
            at: Any = parameter  # Any: attributes of megatron-core's and ours
            at.stored_slice = self.stored  # how checkpoints see it
            at.tensor_model_parallel = self.split(parameter)  # megatron-core sets it only where it initialises weights

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.built.chunk.named_parameters():
            if name.startswith("decoder.layers."):
                head, number, rest = name.removeprefix("decoder.").split(".", 2)
                name = f"decoder.{head}.{int(number) + self.built.layer_offset}.{rest}"
            elif name == "output_layer.weight" and self.facts.tied:
                name = WORDS  # the copy on the last stage
            yield name, parameter

    # -- what checkpoints and optimizers ask ----------------------------------------------------------------------
    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by their names in the whole model; they have no duplicates and no submodules."""
        lead = f"{prefix}." if prefix else ""
        yield from ((lead + name, parameter) for name, parameter in self.held.items())

    def state_dict(self, *args: Any, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:  # type: ignore[override]
        """The parameters, or whole weights in the Hub layout while those may be written. Any: torch's own signature."""
        state = dict(self.held) if self.hub is None else self.hub
        return {prefix + name: value if keep_vars else value.detach() for name, value in state.items()}

    def place_of(self, parameter: Tensor, rank: int | None = None) -> Place:
        """Where this tensor parallel rank's part of a parameter, or that of another, lies in the whole tensor."""
        own, ranks = self.tp
        split = self.entries[self._names[id(parameter)]].split
        return place(split, tuple(parameter.shape), own if rank is None else rank, ranks, self.facts.vocab)

    def split(self, parameter: Tensor) -> bool:
        """Whether tensor parallel ranks hold different parts of a parameter."""
        return self.tp[1] > 1 and self.entries[self._names[id(parameter)]].split != "whole"

    def owns(self, parameter: Tensor) -> bool:
        """Whether this rank writes its part of a parameter into checkpoints."""
        return self._owned and (self.split(parameter) or self.tp[0] == 0)

    def stored(self, parameter: Tensor) -> Any:  # Any: a slice, as checkpoints see it
        """This rank's part of a parameter."""
        return slice_of(parameter, self.place_of(parameter), self.owns(parameter))

    @torch.no_grad()
    def fill(self, hub: dict[str, Tensor]) -> None:
        """Take this rank's parts of whole weights in the Hub layout. Local."""
        for name, parameter in self.held.items():
            entry, at = self.entries[name], self.place_of(parameter)
            if at.size != at.view:
                parameter.zero_()  # rows that pad the vocabulary: never read, and never trained
            part_of(parameter.data, at).copy_(box_of(fuse(entry, hub, self.facts), at))

    # -- calling it -----------------------------------------------------------------------------------------------
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **others: Any,  # Any: arguments of the transformers model that have no counterpart
    ) -> Any:
        """Loss and logits, as the transformers model gives them; with gradients and labels the loss alone.

        Raises: StepError for arguments that the engine would ignore.
        """
        unused = {
            name: value
            for name, value in others.items()
            if value is not None and name not in ("return_dict", "use_cache")
        }
        if unused:
            raise StepError(
                f"the model was called with {sorted(unused)}, which the engine's layers do not take and would ignore; give input_ids, "
                "attention_mask, position_ids and labels."
            )
        length = input_ids.shape[1]
        if self._seq_length not in (None, length) or length > self.facts.positions:
            raise StepError(
                f"a batch has sequences of {length} tokens, and "
                + (
                    f"megatron.seq_length={self._seq_length}; pad to that length, or leave it out."
                    if self._seq_length not in (None, length)
                    else f"the model has {self.facts.positions} positions; cut the sequences."
                )
            )
        if not self.in_schedule and self.built.config.pipeline_model_parallel_size > 1:
            return self._through(self, (input_ids, attention_mask, position_ids, labels))
        if not self.in_schedule and torch.is_grad_enabled():
            self._draw()
        return self.run(input_ids, attention_mask, position_ids, labels)

    def run(
        self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, labels: Tensor | None
    ) -> Any:  # Any: an output of transformers
        """Run this rank's layers. Raises: StageOutput on a stage that is not the last."""
        rows, length = input_ids.shape
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device).expand(rows, length)
        with megatron_engine.hushed():
            out = self.engine(input_ids, position_ids, _blocked(input_ids, attention_mask))
            if not self.built.last:
                raise StageOutput(out)
            logits = self._without_padding(out.float())
            loss = None if labels is None else self._loss(logits, labels)
            shown = None
            if loss is None or not torch.is_grad_enabled():
                gather = megatron_engine.package("tensor_parallel").gather_from_tensor_model_parallel_region
                shown = gather(logits)[..., : self.facts.vocab]
        return self._output(loss=loss, logits=shown)

    def _without_padding(self, logits: Tensor) -> Tensor:
        """Logits in which the columns that pad the vocabulary have no weight."""
        width, start = logits.shape[-1], logits.shape[-1] * self.tp[0]
        real = max(0, min(width, self.facts.vocab - start))
        if real == width:
            return logits
        return functional.pad(logits[..., :real], (0, width - real), value=torch.finfo(logits.dtype).min)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean cross entropy of the next tokens, over vocabularies divided by rank."""
        following = functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)
        counted = following != _IGNORED
        parallel = megatron_engine.package("tensor_parallel")
        each: Tensor = parallel.vocab_parallel_cross_entropy(logits, following.clamp(min=0))
        return (each * counted).sum() / counted.sum()


def _blocked(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Which pairs of tokens must not see each other: later ones, and padding."""
    length = input_ids.shape[1]
    later = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).triu(1)[None, None]
    if attention_mask is None:
        return later
    return later | (attention_mask == 0)[:, None, None, :]
