"""Metrics of usual tasks against scikit-learn and torch."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score

from hasten.errors import DataError
from hasten.trainer import EvalPrediction, classification_metrics


@pytest.mark.parametrize("classes", [2, 3, 7])
@pytest.mark.parametrize("length", [1, 5, 200])
def test_classification_is_what_scikit_learn_says(classes: int, length: int) -> None:
    random = np.random.default_rng(classes * length)
    logits, labels = (
        random.normal(size=(length, classes)),
        random.integers(classes, size=length),
    )
    metrics = classification_metrics(EvalPrediction(logits, labels))
    answers = logits.argmax(-1)
    assert metrics["accuracy"] == pytest.approx(accuracy_score(labels, answers))
    kind = (
        {"pos_label": 1, "average": "binary"} if classes == 2 else {"average": "macro"}
    )
    assert metrics["f1"] == pytest.approx(
        f1_score(labels, answers, zero_division=0.0, **kind)
    )


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(DataError, match="preprocess_logits_for_metrics"):
        classification_metrics(EvalPrediction(np.zeros(3), np.zeros(3)))
    with pytest.raises(DataError, match="one label per sample"):
        classification_metrics(EvalPrediction(np.zeros((3, 2)), np.zeros((3, 4))))
