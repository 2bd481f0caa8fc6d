"""fp16 that skips every update warns, stops with a reason, and never runs on a scale of zero."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from hasten.config.sections.loop import GradScalerKwargs
from hasten.errors import HastenWarning, LossScaleError, StepError
from hasten.precision.build import build_precision
from hasten.precision.scaler import LossScaler

CPU = torch.device("cpu")


def skips(
    count: int, kwargs: GradScalerKwargs, good: frozenset[int] = frozenset()
) -> LossScaler:
    """Train on losses that are nan, but for some."""
    precision = build_precision("fp16", CPU, scaler=kwargs)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(count):
        torch.autograd.backward(
            precision.scale(weight.sum() * (1.0 if step in good else float("nan")))
        )
        assert precision.step(optimizer).applied == (step in good)
        optimizer.zero_grad()
    assert isinstance(precision.scaler, LossScaler)
    return precision.scaler


def test_a_few_skips_are_silent_and_more_are_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        skips(8, GradScalerKwargs())
        skips(40, GradScalerKwargs(), good=frozenset(range(5, 40, 6)))
    with pytest.warns(HastenWarning, match="the last 8 updates were skipped"):
        skips(9, GradScalerKwargs())


@pytest.mark.filterwarnings(
    "ignore:fp16. the last 8 updates:hasten.errors.HastenWarning"
)
def test_many_skips_stop_training_with_a_reason() -> None:
    with pytest.raises(LossScaleError, match="50 updates in a row were skipped"):
        skips(51, GradScalerKwargs())
    with pytest.raises(StepError, match=r"scaler\.max_skipped_steps=3"):
        skips(4, GradScalerKwargs(max_skipped_steps=3))
    assert skips(100, GradScalerKwargs(max_skipped_steps=None)).get_scale() > 0


@pytest.mark.filterwarnings(
    "ignore:fp16. the last 8 updates:hasten.errors.HastenWarning"
)
def test_the_scale_never_reaches_zero_in_silence() -> None:
    with pytest.raises(LossScaleError, match=r"\(has run out\)"):
        skips(400, GradScalerKwargs(max_skipped_steps=None))
    with pytest.raises(LossScaleError, match=r"\(has run out\)"):
        skips(400, GradScalerKwargs(max_skipped_steps=None, backoff_factor=1e-9))
