"""Columns of a dataset: which of them a model takes, and dropping the others before they are read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from hasten.errors import DataError

LABELS: Final = ("labels", "label", "label_ids")


def taken_by(model: nn.Module, label_names: Sequence[str]) -> frozenset[str] | None:
    """The names that the model's forward takes, and its labels; None when it takes any name."""
    parameters = inspect.signature(model.forward).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not named:
        return None
    return frozenset([*named, *LABELS, *label_names])


def without_unused(dataset: Any, taken: frozenset[str] | None) -> Any:  # Any: datasets have no common base
    """The dataset without columns that nobody takes; other datasets than those of `datasets` come back as they are.

    Raises: DataError when no column is left.
    """
    names = getattr(dataset, "column_names", None)
    if taken is None or not isinstance(names, list) or not hasattr(dataset, "remove_columns"):
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
    """A collator that gets only the columns somebody takes."""

    collate: Callable[[list[Any]], Any]  # Any: samples and batches of the user's
    taken: frozenset[str]

    def __call__(self, samples: list[Any]) -> Any:
        if samples and isinstance(samples[0], Mapping):
            samples = [{key: value for key, value in sample.items() if key in self.taken} for sample in samples]
            if not samples[0]:
                raise DataError(
                    "the samples have no key that the model's forward takes, so the batch would be empty; rename the keys, or "
                    "set remove_unused_columns=False."
                )
        return self.collate(samples)
