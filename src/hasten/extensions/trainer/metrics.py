"""Metrics of common tasks for `compute_metrics`, exact on any number of processes, because they see every sample once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hasten.errors import DataError
from hasten.extensions.trainer.evaluation import EvalPrediction

Array = NDArray[Any]  # Any: numbers of any dtype


def classification_metrics(found: EvalPrediction) -> dict[str, float]:
    """Return accuracy and F1 of one label per sample: F1 of class 1 for two classes, else the mean over the classes.

    Raises: DataError if predictions are not class scores, or labels do not match them.
    """
    logits, labels = _logits(found, 2), np.asarray(found.label_ids)
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise DataError(
            f"predictions of shape {logits.shape} and labels of shape {labels.shape} are not one label per sample; compute "
            "the metrics of other tasks in a custom function."
        )
    answers = logits.argmax(-1)
    classes = (
        [1] if logits.shape[1] == 2 else sorted({*answers.tolist(), *labels.tolist()})
    )
    return {
        "accuracy": _accuracy(answers, labels),
        "f1": float(np.mean([_f1(answers, labels, one) for one in classes])),
    }


def _logits(found: EvalPrediction, ndim: int) -> Array:
    first = (
        found.predictions[0]
        if isinstance(found.predictions, (tuple, list))
        else found.predictions
    )
    logits = np.asarray(first)
    if logits.ndim != ndim:
        raise DataError(
            f"predictions have the shape {logits.shape} instead of {ndim} dimensions, so they are not class scores; "
            "let the model return its logits first, or pick them with preprocess_logits_for_metrics."
        )
    return logits


def _accuracy(answers: Array, truths: Array) -> float:
    return float((answers == truths).mean()) if len(truths) else math.nan


def _f1(answers: Array, truths: Array, one: int) -> float:
    hits = int(((answers == one) & (truths == one)).sum())
    both = int((answers == one).sum() + (truths == one).sum())
    return 2 * hits / both if both else 0.0
