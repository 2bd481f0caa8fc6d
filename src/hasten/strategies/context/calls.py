"""Forward pre-hook for context parallelism: adds arguments that only the whole sequence determines, such as positions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hasten.errors import StepError
from hasten.strategies.context.masks import IGNORED, BufferFlags
from hasten.strategies.context.ops import shard_of_rank
from hasten.strategies.context.sdpa import SequenceAttention
from hasten.strategies.context.sequence_plan import SequenceLayout

# Any in this file: the arguments of the user's models, and transformers, which is untyped here.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
SPANNING_ATTENTION: Final = "sdpa_over_sequence_parts"
"""Name of an attention function of transformers that spans the shards of all ranks itself, outside a block too."""
_LABELS: Final = ("labels", "targets")
"""Arguments from which a user's model may compute its loss."""
_SEQUENCES: Final = (
    "attention_mask",
    "labels",
    "shift_labels",
    "position_ids",
    "token_type_ids",
    "inputs_embeds",
)
"""Arguments of transformers' models with one entry per token."""
_WRITE: Final = (
    "Write: with accelerator.context_parallel([tokens, labels], [1, 1]): around the forward and backward() of each batch, "
    "with every tensor that has a sequence dimension"
)


@dataclass(slots=True)
class OpenBlock:
    """State of a running `context_parallel()` block: the buffers before sharding, and the attention inside the block."""

    layout: SequenceLayout
    rank: int
    buffers: list[tuple[Tensor, Tensor, int]]
    """Each buffer, its whole tensor, and its sequence dimension."""
    attention: SequenceAttention
    read_flags: Callable[[], list[BufferFlags]]
    """Returns the properties of the buffers."""
    weigh: Callable[[Tensor, Tensor], None]
    """Weighs this rank's loss by its labels, given this rank's labels and the labels of the whole sequence."""

    def find_buffer(self, value: object) -> tuple[Tensor, int] | None:
        """Return the whole tensor of a buffer and its sequence dimension; None for other values."""
        for tensor, whole_tensor, dim in self.buffers:
            if tensor is value:
                return (whole_tensor, dim)
        return None

    def local_shard(self, whole_tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's shard of a tensor."""
        return shard_of_rank(whole_tensor, dim, self.layout, self.rank)


class CallHook:
    """Forward pre-hook of a prepared model; copies of the model share it."""

    def __init__(
        self,
        inner: nn.Module,
        trainable: bool,
        num_ranks: int,
        opened: Callable[[], OpenBlock | None],
    ) -> None:
        self._inner = inner
        self._trainable = trainable
        self._ranks = num_ranks
        self._opened = opened
        # a model wrapped by peft
        get_base_model: Any = getattr(inner, "get_base_model", None)
        self._base: Any = get_base_model() if callable(get_base_model) else inner
        self._signature = inspect.signature(inner.forward)
        self._accepts = inspect.signature(self._base.forward).parameters
        causal_flags = []
        for module in inner.modules():
            if isinstance(getattr(module, "is_causal", None), bool):
                causal_flags.append(module.is_causal)
        self._declares_attention = len(set(causal_flags)) == 1
        self._causal = self._declares_attention and causal_flags[0]
        self._checked = False

    def __deepcopy__(self, memo: object) -> CallHook:
        return self

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _no_hook, ()  # a pickled model is used outside this run

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        block = self._opened()
        if block is None:
            self._refuse_outside(model)
            return None
        bound_arguments = self._signature.bind_partial(*args, **kwargs)
        extra_name = None
        for p in self._signature.parameters.values():
            if p.kind is p.VAR_KEYWORD:
                extra_name = p.name
                break
        arguments = {
            **bound_arguments.arguments,
            **bound_arguments.arguments.get(extra_name or "", {}),
        }
        arguments.pop(extra_name or "", None)
        changed_arguments = self._complete_arguments(block, arguments)
        if not self._checked:
            self._checked = True
            block.attention.start()
            if "position_ids" not in changed_arguments and not self._has_positions(
                block, arguments
            ):
                self._refuse_unknown_positions()
            if not hasattr(self._base, "loss_function"):
                self._refuse_labels(block, arguments)
        if not changed_arguments:
            return None
        for name, value in changed_arguments.items():
            if name in self._signature.parameters:
                bound_arguments.arguments[name] = value
            else:
                bound_arguments.arguments.setdefault(extra_name or name, {})[name] = (
                    value
                )
        return bound_arguments.args, bound_arguments.kwargs

    def _refuse_unknown_positions(self) -> None:
        raise StepError(
            f"{type(self._inner).__name__} was called with tokens and without positions in a context-parallel block, where it sees parts of "
            "sequences and cannot count positions itself. Pass the positions to the model and to the block as a buffer: "
            "context_parallel([tokens, labels, positions], [1, 1, 1]) with positions = torch.arange(length).expand(batch, -1), or set "
            "cp_size=1."
        )

    def _refuse_labels(self, open_block: OpenBlock, arguments: dict[str, Any]) -> None:
        for name in _LABELS:
            labels = open_block.find_buffer(arguments.get(name))
            if labels is not None and not labels[0].is_floating_point():
                raise StepError(
                    f"{type(self._inner).__name__} was called with {name!r} in a context-parallel block. A model that shifts its labels "
                    "would lose the tokens at the ends of parts, so labels are not passed to it: shift them before the block, and compute "
                    "the loss from the logits, with torch.nn.functional.cross_entropy()."
                )

    def _refuse_outside(self, model: nn.Module) -> None:
        spanned = (
            getattr(getattr(self._base, "config", None), "_attn_implementation", None)
            == SPANNING_ATTENTION
        )
        if (
            self._trainable
            and model.training
            and torch.is_grad_enabled()
            and not spanned
        ):
            raise StepError(
                f"{type(self._inner).__name__} was called for training outside accelerator.context_parallel(), although "
                f"cp_size={self._ranks}: each of {self._ranks} ranks would compute whole sequences. "
                f"{_WRITE}; call the model under torch.no_grad() or in eval mode for whole sequences, or set cp_size=1."
            )

    def _has_positions(
        self, open_block: OpenBlock, arguments: Mapping[str, Any]
    ) -> bool:
        """Return whether an argument holds the positions of the sequence, or no argument holds tokens of the block.

        An argument that is no buffer may be positions that the caller computed inside the block.
        """
        buffer_flags = open_block.read_flags()
        has_tokens = False
        for argument in arguments.values():
            if not isinstance(argument, Tensor):
                continue
            index = None
            for n, (tensor, _, _) in enumerate(open_block.buffers):
                if tensor is argument:
                    index = n
                    break
            if index is None or buffer_flags[index].counts_positions:
                return True
            has_tokens = has_tokens or argument.dtype in (torch.int64, torch.int32)
        return not has_tokens

    def _complete_arguments(
        self, open_block: OpenBlock, arguments: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments to change, with their new values."""
        changed_arguments: dict[str, Any] = {}
        sequence = next(
            (
                whole_buffer
                for name in arguments
                if (whole_buffer := open_block.find_buffer(arguments[name])) is not None
            ),
            None,
        )
        if sequence is None:
            return changed_arguments
        length = sequence[0].shape[sequence[1]]
        self._refuse_wholes(open_block, arguments, length)
        self._refuse_windows(length)
        if "position_ids" in self._accepts and arguments.get("position_ids") is None:
            self._refuse_other_positions()
            positions = torch.arange(length, device=sequence[0].device)
            changed_arguments["position_ids"] = open_block.local_shard(
                positions, 0
            ).unsqueeze(0)
        labels = self._shift_labels(open_block, arguments)
        if labels is not None:
            changed_arguments["shift_labels"] = labels[0]
        mask = open_block.find_buffer(arguments.get("attention_mask"))
        if mask is not None and self._declares_attention and mask[0].ndim == 2:
            shifted_labels = open_block.find_buffer(arguments.get("shift_labels"))
            if labels is not None:
                shifted_labels = labels[1], 1
            self._take_mask(
                open_block,
                mask[0] != 0,
                None if shifted_labels is None else shifted_labels[0],
            )
            changed_arguments["attention_mask"] = None
        return changed_arguments

    def _refuse_wholes(
        self, open_block: OpenBlock, arguments: Mapping[str, Any], length: int
    ) -> None:
        """Raise StepError for an argument that spans the whole sequence beside sharded ones."""
        for name in _SEQUENCES:
            value = arguments.get(name)
            if (
                isinstance(value, Tensor)
                and value.ndim > 1
                and value.shape[1] == length
                and open_block.find_buffer(value) is None
            ):
                raise StepError(
                    f"{type(self._base).__name__} was called with {name} of shape {tuple(value.shape)}, which spans whole sequences but "
                    "is not a buffer of the context-parallel block. Add it to the buffers, with its sequence dimension."
                )

    def _refuse_windows(self, length: int) -> None:
        """Raise StepError for a model of transformers whose layers attend within a window that sharding would ignore."""
        config: Any = getattr(self._base, "config", None)
        layer_types = getattr(config, "layer_types", None)
        for name, kind in (
            ("sliding_window", "sliding_attention"),
            ("attention_chunk_size", "chunked_attention"),
        ):
            window = getattr(config, name, None)
            if (
                isinstance(window, int)
                and window < length
                and (layer_types is None or kind in layer_types)
            ):
                raise StepError(
                    f"{type(self._base).__name__} has config.{name}={window}, and sequences of {length} tokens that are split over "
                    f"{self._ranks} ranks are attended to without a window. Use sequences of at most {window} tokens, or cp_size=1."
                )

    def _refuse_other_positions(self) -> None:
        """Raise StepError for a model whose positions are not 0, 1, 2, … of each sequence."""
        padded_embeddings = []
        for module_name, module in self._base.named_modules():
            if (
                isinstance(module, nn.Embedding)
                and module.padding_idx is not None
                and "position" in module_name
            ):
                padded_embeddings.append(module_name)
        if padded_embeddings or hasattr(self._base, "get_rope_index"):
            if padded_embeddings:
                reason = f"counts positions from {padded_embeddings[0]!r}'s padding_idx"
            else:
                reason = "computes them from its images"
            raise StepError(
                f"{type(self._base).__name__} was called without position_ids inside a context-parallel block, and {reason}; for a part of "
                "a sequence they would be wrong. Compute position_ids of whole sequences and pass them as a buffer."
            )

    def _shift_labels(
        self, open_block: OpenBlock, arguments: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor] | None:
        """Return this rank's labels and all labels, shifted by one, for a model that would shift its shard of them itself.

        Raises: StepError for a model that shifts labels and takes no shifted ones.
        """
        labels = open_block.find_buffer(arguments.get("labels"))
        if (
            labels is None
            or arguments.get("shift_labels") is not None
            or not hasattr(self._base, "loss_function")
        ):
            return None
        if getattr(self._base.loss_function, "__name__", "") != "ForCausalLMLoss":
            return None
        if (
            "loss_function"
            not in inspect.unwrap(type(self._base).forward).__code__.co_names
        ):
            raise StepError(
                f"{type(self._base).__name__} shifts labels in its forward, so the tokens at the ends of each rank's part would be "
                "lost. Shift the labels before the block and compute the loss from the logits."
            )
        whole_labels = F.pad(
            labels[0].narrow(labels[1], 1, labels[0].shape[labels[1]] - 1),
            (0, 1),
            value=IGNORED,
        )
        shard_labels = open_block.local_shard(whole_labels, labels[1])
        open_block.attention.start()  # weighs by the unshifted labels, so it runs first
        if arguments.get("num_items_in_batch") is None:
            open_block.weigh(shard_labels, whole_labels)
        return shard_labels, whole_labels

    def _take_mask(
        self, open_block: OpenBlock, is_real: Tensor, labels: Tensor | None
    ) -> None:
        """Hide the padding of whole sequences in the block's attention, unless no label is predicted from it.

        `labels` are aligned with the tokens that predict them. Raises: StepError for a causal model with padding on the left.
        """
        if self._causal:
            pads_right = (is_real[:, :-1] | ~is_real[:, 1:]).all()
            is_unused = torch.zeros_like(pads_right)
            if labels is not None:
                is_unused = (is_real | (labels == IGNORED)).all()
            pads_right, is_unused = torch.stack([pads_right, is_unused]).tolist()
            if not pads_right:
                raise StepError(
                    f"{type(self._base).__name__} was called with an attention_mask that hides tokens before others of the same sequence, which is "
                    "not supported inside a context-parallel block. Pad sequences on the right."
                )
            if is_unused:
                return
        open_block.attention.key_mask = is_real[:, None, None, :]


def _no_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: object) -> None:
    return None
