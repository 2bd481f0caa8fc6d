"""Collators that stack samples to a batch, with `label` renamed to `labels` and sequences padded to the longest."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler, default_collate

from hasten.data import PackedCollator
from hasten.errors import ArgumentError, ConfigError, DataError

_RENAMED: Final = ("label", "label_ids")
IGNORED: Final = -100
"""Label that losses ignore."""


def default_data_collator(features: list[Any]) -> Any:  # Any: samples of any type
    """Stack samples to a batch; a key `label` or `label_ids` becomes `labels`. All samples must have equal shapes.

    Raises: DataError for sequences of different lengths.
    """
    if not features or not isinstance(features[0], Mapping):
        return default_collate(features)
    batch = {}
    for key in features[0]:
        values = [
            torch.as_tensor(feature[key])
            for feature in features
            if feature[key] is not None
        ]
        if len(values) != len(features):
            continue  # a column that some samples lack cannot be used
        if len({value.shape for value in values}) > 1:
            raise DataError(
                f"samples of one batch have {key} of different shapes ({sorted({tuple(v.shape) for v in values})}), which "
                "cannot be stacked; give the Trainer processing_class=tokenizer or data_collator=DataCollatorWithPadding(…)."
            )
        batch["labels" if key in _RENAMED else key] = torch.stack(values)
    return batch


class DataCollatorWithPadding:
    """Collator that pads sequences to the longest of the batch: tokens with the padding token, masks with 0, labels with -100.

    The padding token and side are taken from `processing_class`, a tokenizer of any library, unless they are given.
    """

    def __init__(
        self,
        processing_class: Any = None,  # Any: a tokenizer of any library
        *,
        pad_token_id: int | None = None,
        padding_side: Literal["right", "left"] | None = None,
        label_pad_token_id: int = IGNORED,
        pad_to_multiple_of: int | None = None,
    ) -> None:
        token_id = (
            getattr(processing_class, "pad_token_id", None)
            if pad_token_id is None
            else pad_token_id
        )
        if token_id is None:
            raise ArgumentError(
                "DataCollatorWithPadding needs a pad_token_id or a tokenizer that has one; pass "
                "pad_token_id=…, or set tokenizer.pad_token."
            )
        self.pad_token_id = int(token_id)
        self.padding_side = padding_side or getattr(
            processing_class, "padding_side", "right"
        )
        self.label_pad_token_id = label_pad_token_id
        self.pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, features: list[Any]) -> Any:  # Any: samples of any type
        """Return the batch of the samples."""
        if not features or not isinstance(features[0], Mapping):
            return default_collate(features)
        columns = {
            key: [torch.as_tensor(feature[key]) for feature in features]
            for key in features[0]
        }
        if "input_ids" in columns and "attention_mask" not in columns:
            columns["attention_mask"] = [
                torch.ones_like(ids) for ids in columns["input_ids"]
            ]
        batch = {}
        for key, values in columns.items():
            name = "labels" if key in _RENAMED else key
            batch[name] = (
                torch.stack(values)
                if values[0].ndim == 0
                else self._padded(values, self._filler(name))
            )
        return batch

    def _filler(self, name: str) -> int:
        if name == "labels":
            return self.label_pad_token_id
        if name == "special_tokens_mask":
            return 1
        return self.pad_token_id if name == "input_ids" else 0

    def _padded(self, values: Sequence[Tensor], filler: int) -> Tensor:
        length = max(value.shape[0] for value in values)
        if self.pad_to_multiple_of:
            length = -(-length // self.pad_to_multiple_of) * self.pad_to_multiple_of
        batch = values[0].new_full((len(values), length, *values[0].shape[1:]), filler)
        for row, value in zip(batch, values, strict=True):
            size = value.shape[0]
            first = 0 if self.padding_side == "right" else length - size
            row[first : first + size] = value
        return batch


LABELS: Final = ("labels", "label", "label_ids")


def taken_by(model: nn.Module, label_names: Sequence[str]) -> frozenset[str] | None:
    """Return the argument names of the model's forward, and the label names; None if it accepts any name."""
    parameters = inspect.signature(model.forward).parameters.values()
    named = [
        p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if not named:
        return None
    return frozenset([*named, *LABELS, *label_names])


# Any: datasets have no common base
def without_unused(dataset: Any, taken: frozenset[str] | None) -> Any:
    """Return the dataset without unused columns; datasets that are not from `datasets` are returned unchanged.

    Raises: DataError if no column is left.
    """
    names = getattr(dataset, "column_names", None)
    if (
        taken is None
        or not isinstance(names, list)
        or not hasattr(dataset, "remove_columns")
    ):
        return dataset
    unused = [name for name in names if name not in taken]
    if len(unused) == len(names):
        raise DataError(
            f"none of the columns {', '.join(names)} is an argument of the model's forward, so every sample would be empty; "
            "rename the columns, tokenize the texts, or set remove_unused_columns=False."
        )
    return dataset.remove_columns(unused) if unused else dataset


@dataclass(frozen=True, slots=True)
class CollateUsed:
    """Collator that passes only the used columns to another collator."""

    collate: Callable[[list[Any]], Any]  # Any: samples and batches of any type
    taken: frozenset[str]

    def __call__(self, samples: list[Any]) -> Any:
        if samples and isinstance(samples[0], Mapping):
            samples = [
                {key: value for key, value in sample.items() if key in self.taken}
                for sample in samples
            ]
            if not samples[0]:
                raise DataError(
                    "the samples have no key that the model's forward takes, so the batch would be empty; rename the keys, or "
                    "set remove_unused_columns=False."
                )
        return self.collate(samples)


def _is_of_transformers(model: nn.Module) -> bool:
    return hasattr(getattr(model, "config", None), "model_type")


def check_packable(model: nn.Module, shifted: bool) -> None:
    """Raise unless the model can train on packed rows. Raises: ConfigError."""
    name = type(model).__name__
    if not shifted:
        raise ConfigError(
            f"packing=True joins samples for a model that predicts the next token, but {name} compares each position with "
            "its own label, and the first label of each sample would be ignored; remove packing, or set loss_type = "
            "'ForCausalLM' on a model that shifts its labels."
        )
    taken = taken_by(model, ())
    if (
        not _is_of_transformers(model)
        and taken is not None
        and "position_ids" not in taken
    ):
        raise ConfigError(
            f"packing=True joins samples in one row, but forward of {name} takes no position_ids, so the samples would attend to "
            "each other; add position_ids and use hasten.data.packed_attention_mask(position_ids), or remove packing."
        )


class PackedRows:
    """Collator that joins samples in one row with the fields that the model takes."""

    def __init__(self, model: nn.Module) -> None:
        self._pack = PackedCollator(transformers=_is_of_transformers(model))

    # Any: samples and batches of any type
    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        """Return the row of the samples."""
        batch = self._pack(samples)
        batch.pop("num_tokens", None)  # the Trainer counts the labels itself
        return batch


_BATCHES_SORTED: Final = 400


class LengthGroupedSampler(Sampler[int]):
    """Shuffling sampler, as a function of seed and epoch, in which chunks of 400 batches are sorted by length.

    The longest sample is first, so that memory runs out in the first step or not at all.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int = 0) -> None:
        self._lengths = torch.as_tensor(lengths)
        quarter = len(lengths) // (
            4 * batch_size
        )  # fewer batches in a chunk for few samples, or all epochs would be alike
        self._stretch = batch_size * max(1, min(quarter, _BATCHES_SORTED))
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order is drawn next."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        order = torch.randperm(len(self), generator=generator)
        chunks = [
            chunk[self._lengths[chunk].argsort(descending=True, stable=True)]
            for chunk in torch.split(order, self._stretch)
        ]
        if len(self):
            longest = max(
                range(len(chunks)),
                key=lambda index: int(self._lengths[chunks[index][0]]),
            )
            chunks[0][0], chunks[longest][0] = (
                chunks[longest][0].clone(),
                chunks[0][0].clone(),
            )
        return iter(torch.cat(chunks).tolist())

    def state_dict(self) -> dict[str, int]:
        """Return the epoch whose order is drawn next."""
        return {"epoch": self._epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the epoch of a checkpoint."""
        self._epoch = int(state["epoch"])


# Any: datasets have no common base
def lengths_of(dataset: Any, column: str, argument: str) -> list[int]:
    """Return the length of every sample, which this argument needs: from its column, or counted from `input_ids`.

    Raises: DataError if samples have neither.
    """
    if column in (getattr(dataset, "column_names", None) or ()):
        return [int(length) for length in dataset[column]]
    first = dataset[0]
    if not isinstance(first, dict) or "input_ids" not in first:
        raise DataError(
            f"{argument}=True needs the lengths of samples, but they have neither a column {column!r} nor input_ids; add one of them, set "
            "length_column_name, or remove the argument."
        )
    return [len(dataset[index]["input_ids"]) for index in range(len(dataset))]
