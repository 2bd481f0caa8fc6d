"""Metrics of common tasks for `compute_metrics`, exact on any number of processes, because they see every sample once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hasten.errors import DataError
from hasten.extensions.trainer.evaluation import EvalPrediction

Array = NDArray[Any]  # Any: numbers of any dtype


def classification_metrics(predicted: EvalPrediction) -> dict[str, float]:
    """Return accuracy and F1 of one label per sample: F1 of class 1 for two classes, else the mean over the classes.

    Raises: DataError if predictions are not class scores, or labels do not match them.
    """
    logits = _logits_of(predicted, 2)
    labels = np.asarray(predicted.label_ids)
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise DataError(
            f"predictions of shape {logits.shape} and labels of shape {labels.shape} are not one label per sample; compute "
            "the metrics of other tasks in a custom function."
        )
    answers = logits.argmax(-1)
    if logits.shape[1] == 2:
        classes = [1]
    else:
        classes = sorted({*answers.tolist(), *labels.tolist()})
    class_scores = []
    for class_label in classes:
        class_scores.append(_f1_score(answers, labels, class_label))
    return {
        "accuracy": _accuracy_of(answers, labels),
        "f1": float(np.mean(class_scores)),
    }


def _logits_of(predicted: EvalPrediction, ndim: int) -> Array:
    if isinstance(predicted.predictions, (tuple, list)):
        first_prediction = predicted.predictions[0]
    else:
        first_prediction = predicted.predictions
    logits = np.asarray(first_prediction)
    if logits.ndim != ndim:
        raise DataError(
            f"predictions have the shape {logits.shape} instead of {ndim} dimensions, so they are not class scores; "
            "let the model return its logits first, or pick them with preprocess_logits_for_metrics."
        )
    return logits


def _accuracy_of(answers: Array, truths: Array) -> float:
    return float((answers == truths).mean()) if len(truths) else math.nan


def _f1_score(answers: Array, truths: Array, class_label: int) -> float:
    num_hits = int(((answers == class_label) & (truths == class_label)).sum())
    num_labels = int((answers == class_label).sum() + (truths == class_label).sum())
    return 2 * num_hits / num_labels if num_labels else 0.0
