"""Collators that stack samples to a batch, with `label` renamed to `labels` and sequences padded to the longest."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from hasten.errors import ArgumentError, DataError

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
