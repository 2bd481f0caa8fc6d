"""Metrics of common tasks for `compute_metrics`, exact on any number of processes, because they see every sample once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hasten.errors import DataError
from hasten.extensions.trainer.collate import IGNORED
from hasten.extensions.trainer.evaluation import EvalPrediction

Array = NDArray[Any]  # Any: numbers of any dtype


def classification_metrics(found: EvalPrediction) -> dict[str, float]:
    """Return accuracy and F1 of one label per sample: F1 of class 1 for two classes, else the mean over the classes.

    Raises: DataError if predictions are not class scores, or labels do not match them.
    """
    logits, labels = _logits(found, 2), np.asarray(found.label_ids)
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise DataError(
            f"predictions of shape {logits.shape} and labels of shape {labels.shape} are not one label per sample; use "
            "token_classification_metrics for one label per token."
        )
    answers = logits.argmax(-1)
    classes = (
        [1] if logits.shape[1] == 2 else sorted({*answers.tolist(), *labels.tolist()})
    )
    return {
        "accuracy": _accuracy(answers, labels),
        "f1": float(np.mean([_f1(answers, labels, one) for one in classes])),
    }


def token_classification_metrics(found: EvalPrediction) -> dict[str, float]:
    """Return accuracy and mean F1 over the classes of all tokens whose label is not -100."""
    logits, labels = _logits(found, 3), np.asarray(found.label_ids)
    counted = labels != IGNORED
    answers, truths = logits.argmax(-1)[counted], labels[counted]
    classes = sorted({*answers.tolist(), *truths.tolist()})
    return {
        "accuracy": _accuracy(answers, truths),
        "f1": float(np.mean([_f1(answers, truths, one) for one in classes]))
        if classes
        else math.nan,
    }


def causal_lm_metrics(found: EvalPrediction) -> dict[str, float]:
    """Return accuracy and perplexity of the next token: each position is compared with the label after it; -100 is ignored.

    Needs the scores of every token: for large vocabularies take the exponential of `eval_loss` instead.
    """
    logits, labels = (
        _logits(found, 3)[:, :-1].astype(np.float64),
        np.asarray(found.label_ids)[:, 1:],
    )
    counted = labels != IGNORED
    scores, truths = logits[counted], labels[counted]
    if not len(truths):
        return {"accuracy": math.nan, "perplexity": math.nan}
    highest = scores.max(-1, keepdims=True)
    normaliser = np.log(np.exp(scores - highest).sum(-1)) + highest[:, 0]
    loss = float((normaliser - scores[np.arange(len(truths)), truths]).mean())
    return {
        "accuracy": _accuracy(scores.argmax(-1), truths),
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
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
