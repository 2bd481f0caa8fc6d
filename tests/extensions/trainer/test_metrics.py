"""Metrics of usual tasks against scikit-learn and torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score

from hasten.errors import DataError
from hasten.trainer import (
    EvalPrediction,
    causal_lm_metrics,
    classification_metrics,
    token_classification_metrics,
)


@pytest.mark.parametrize("classes", [2, 3, 7])
@pytest.mark.parametrize("length", [1, 5, 200])
def test_classification_is_what_scikit_learn_says(classes: int, length: int) -> None:
    random = np.random.default_rng(classes * length)
    logits, labels = (
        random.normal(size=(length, classes)),
        random.integers(classes, size=length),
    )
    found = classification_metrics(EvalPrediction(logits, labels))
    answers = logits.argmax(-1)
    assert found["accuracy"] == pytest.approx(accuracy_score(labels, answers))
    kind = (
        {"pos_label": 1, "average": "binary"} if classes == 2 else {"average": "macro"}
    )
    assert found["f1"] == pytest.approx(
        f1_score(labels, answers, zero_division=0.0, **kind)
    )


def test_tokens_without_a_label_do_not_count() -> None:
    random = np.random.default_rng(0)
    logits, labels = random.normal(size=(6, 9, 4)), random.integers(4, size=(6, 9))
    labels[random.random((6, 9)) < 0.4] = -100
    found = token_classification_metrics(EvalPrediction((logits, "more"), labels))
    counted = labels != -100
    assert found["accuracy"] == pytest.approx(
        accuracy_score(labels[counted], logits.argmax(-1)[counted])
    )
    expected = f1_score(
        labels[counted], logits.argmax(-1)[counted], average="macro", zero_division=0.0
    )
    assert found["f1"] == pytest.approx(expected)


def test_perplexity_is_that_of_the_next_token() -> None:
    logits, labels = (
        torch.randn(3, 7, 11, dtype=torch.float64),
        torch.randint(11, (3, 7)),
    )
    labels[0, 3:] = -100
    found = causal_lm_metrics(EvalPrediction(logits.numpy(), labels.numpy()))
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )
    assert found["perplexity"] == pytest.approx(math.exp(float(loss)))
    assert math.isnan(
        causal_lm_metrics(EvalPrediction(np.zeros((1, 2, 3)), np.full((1, 2), -100)))[
            "perplexity"
        ]
    )


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(DataError, match="preprocess_logits_for_metrics"):
        classification_metrics(EvalPrediction(np.zeros(3), np.zeros(3)))
    with pytest.raises(DataError, match="token_classification_metrics"):
        classification_metrics(EvalPrediction(np.zeros((3, 2)), np.zeros((3, 4))))
