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
    for column_name in features[0]:
        column_values = []
        for feature in features:
            if feature[column_name] is not None:
                column_values.append(torch.as_tensor(feature[column_name]))
        if len(column_values) != len(features):
            continue  # a column that some samples lack cannot be used
        if len({column_value.shape for column_value in column_values}) > 1:
            raise DataError(
                f"samples of one batch have {column_name} of different shapes ({sorted({tuple(column_value.shape) for column_value in column_values})}), which "
                "cannot be stacked; give the Trainer processing_class=tokenizer or data_collator=DataCollatorWithPadding(…)."
            )
        batch_key = "labels" if column_name in _RENAMED else column_name
        batch[batch_key] = torch.stack(column_values)
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
        if pad_token_id is None:
            token_id = getattr(processing_class, "pad_token_id", None)
        else:
            token_id = pad_token_id
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
            column_name: [torch.as_tensor(feature[column_name]) for feature in features]
            for column_name in features[0]
        }
        if "input_ids" in columns and "attention_mask" not in columns:
            columns["attention_mask"] = list(map(torch.ones_like, columns["input_ids"]))
        batch = {}
        for column_name, column_values in columns.items():
            batch_key = "labels" if column_name in _RENAMED else column_name
            if column_values[0].ndim == 0:
                batch[batch_key] = torch.stack(column_values)
            else:
                padding_value = self._padding_value(batch_key)
                batch[batch_key] = self._pad_values(column_values, padding_value)
        return batch

    def _padding_value(self, batch_key: str) -> int:
        if batch_key == "labels":
            return self.label_pad_token_id
        if batch_key == "special_tokens_mask":
            return 1
        return self.pad_token_id if batch_key == "input_ids" else 0

    def _pad_values(
        self, column_values: Sequence[Tensor], padding_value: int
    ) -> Tensor:
        padded_length = max(column_value.shape[0] for column_value in column_values)
        if self.pad_to_multiple_of:
            padded_length = (
                -(-padded_length // self.pad_to_multiple_of) * self.pad_to_multiple_of
            )
        batch = column_values[0].new_full(
            (len(column_values), padded_length, *column_values[0].shape[1:]),
            padding_value,
        )
        for row, column_value in zip(batch, column_values, strict=True):
            row_length = column_value.shape[0]
            if self.padding_side == "right":
                first_index = 0
            else:
                first_index = padded_length - row_length
            row[first_index : first_index + row_length] = column_value
        return batch


LABELS: Final = ("labels", "label", "label_ids")


def taken_by(model: nn.Module, label_names: Sequence[str]) -> frozenset[str] | None:
    """Return the argument names of the model's forward, and the label names; None if it accepts any name."""
    parameters = inspect.signature(model.forward).parameters.values()
    parameter_names = []
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            parameter_names.append(parameter.name)
    if not parameter_names:
        return None
    return frozenset([*parameter_names, *LABELS, *label_names])


# Any: datasets have no common base
def without_unused(dataset: Any, taken: frozenset[str] | None) -> Any:
    """Return the dataset without unused columns; datasets that are not from `datasets` are returned unchanged.

    Raises: DataError if no column is left.
    """
    column_names = getattr(dataset, "column_names", None)
    if (
        taken is None
        or not isinstance(column_names, list)
        or not hasattr(dataset, "remove_columns")
    ):
        return dataset
    unused_columns = [batch_key for batch_key in column_names if batch_key not in taken]
    if len(unused_columns) == len(column_names):
        raise DataError(
            f"none of the columns {', '.join(column_names)} is an argument of the model's forward, so every sample would be empty; "
            "rename the columns, tokenize the texts, or set remove_unused_columns=False."
        )
    return dataset.remove_columns(unused_columns) if unused_columns else dataset


@dataclass(frozen=True, slots=True)
class CollateUsed:
    """Collator that passes only the used columns to another collator."""

    collate: Callable[[list[Any]], Any]  # Any: samples and batches of any type
    taken: frozenset[str]

    def __call__(self, samples: list[Any]) -> Any:
        if samples and isinstance(samples[0], Mapping):
            samples = list(map(self._keep_taken, samples))
            if not samples[0]:
                raise DataError(
                    "the samples have no key that the model's forward takes, so the batch would be empty; rename the keys, or "
                    "set remove_unused_columns=False."
                )
        return self.collate(samples)

    # Any: values of a sample
    def _keep_taken(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in sample.items() if name in self.taken}
