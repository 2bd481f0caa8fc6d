"""Arguments that Local SGD refuses; its updates: tests/dist/optim/test_optim_agreement.py."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from hasten import Accelerator, LocalSGD
from hasten.errors import HastenError


@pytest.mark.parametrize(
    ("accelerator", "steps", "match"),
    [(None, "x", "whole number of at least 1"), (3, 2, "Give the Accelerator")],
)
def test_nonsense_is_refused_by_name(accelerator: Any, steps: Any, match: str) -> None:
    with pytest.raises(HastenError, match=match):
        LocalSGD(accelerator or Accelerator(cpu=True), nn.Linear(1, 1), steps)
