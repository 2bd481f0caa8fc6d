"""Weighted losses add up to the weighted mean over micro-steps and ranks, for every number of both."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from hasten.comm.base import Comm
from hasten.errors import ConfigError, StepError
from hasten.optim.loss_weights import LossWeights, agree_on_unit, checked_weight
from hasten.optim.window import Holder, Window


@dataclass
class Totals:
    """Process group of which one member is here: its sums and maxima are known in advance."""

    size: int
    largest: float
    sums: dict[int, float] = field(default_factory=dict)
    """Total weight over all ranks of the first, second, ... loss of the window."""
    reduced_weights: list[list[int]] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    device = torch.device("cpu")

    def all_reduce(self, tensor: Tensor, kind: str = "sum") -> Tensor:
        if kind == "max":
            return torch.tensor(max(self.largest, float(tensor)))
        self.reduced_weights.append(tensor.tolist())
        assert tensor.dtype == torch.float64, "counts are exact"
        return torch.tensor(
            [self.sums.pop(index) for index in sorted(self.sums)][: len(tensor)],
            dtype=torch.float64,
        )


@dataclass
class Optimizer:
    """Holder of gradients, settled for one window."""

    serial: int
    spent: bool = False

    def settled_in(self, serial: int) -> bool:
        return self.serial == serial


def weigh(
    weights: LossWeights,
    window: Window,
    loss: float,
    weight: Any,
    holders: Sequence[Optimizer] = (),
) -> float:
    """Return the share of a loss; the window has begun its micro-step."""
    boundary = window.micro in (0, window.every)
    tensor = torch.tensor(loss, dtype=torch.float64)
    share = weights.weigh(
        window, tensor, weight, boundary, cast(Sequence[Holder], holders)
    )
    return float(share)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_windows_give_the_weighted_mean(num_ranks: int) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        every = rng.randint(1, 4)
        counts = [[rng.randint(0, 9) for _ in range(every)] for _ in range(num_ranks)]
        losses = [[rng.uniform(-2, 2) for _ in range(every)] for _ in range(num_ranks)]
        largest = max(rank_counts[0] for rank_counts in counts)
        total = sum(map(sum, counts))
        gradient = 0.0
        for rank_counts, rank_losses in zip(counts, losses, strict=True):
            group = Totals(num_ranks, largest, {0: total})
            weights = LossWeights(cast(Comm, group) if num_ranks > 1 else None)
            window = Window(every, serial=1)
            shares = []
            for loss, count in zip(rank_losses, rank_counts, strict=True):
                window.micro, window.turn = window.micro + 1, 0
                shares.append(weigh(weights, window, loss, count))
            correction = float(weights.correction(window))
            assert float(weights.correction(window)) == correction
            # one sum a window, of the number on this rank
            assert group.reduced_weights == (
                [[sum(rank_counts)]] if num_ranks > 1 else []
            )
            gradient += sum(shares) * correction / num_ranks
            if not total:
                assert correction == 1.0
        mean = sum(
            count * loss
            for rank_counts, rank_losses in zip(counts, losses, strict=True)
            for count, loss in zip(rank_counts, rank_losses, strict=True)
        ) / (total or 1)
        assert gradient == pytest.approx(mean, abs=1e-12), seed


@pytest.mark.parametrize("in_accumulate", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_losses_of_one_micro_step_are_divided_by_totals_of_their_own(
    num_ranks: int, in_accumulate: bool
) -> None:
    counts = [[3, 5, 1], [2, 0, 6], [7, 4, 4]][:num_ranks]
    losses = [[0.5, -1.0, 3.0], [2.0, 9.0, -0.25], [1.0, 0.125, 6.0]][:num_ranks]
    totals = [sum(column) for column in zip(*counts, strict=True)]
    gradient = 0.0
    for rank_counts, rank_losses in zip(counts, losses, strict=True):
        group = Totals(num_ranks, max(row[0] for row in counts))
        weights = LossWeights(cast(Comm, group) if num_ranks > 1 else None)
        window = Window(1, serial=1, micro=int(in_accumulate))
        shares = []
        for index, (loss, count) in enumerate(
            zip(rank_losses, rank_counts, strict=True)
        ):
            group.sums = {index: totals[index]}
            if index == 1:
                group.sums[0] = totals[0]
            shares.append(weigh(weights, window, loss, count))
        correction = float(weights.correction(window))
        # the second loss shows that there are several: both totals are needed
        expected_sums = [rank_counts[:2], rank_counts[2:]] if num_ranks > 1 else []
        assert group.reduced_weights == expected_sums
        gradient += sum(shares) * correction / num_ranks
    mean = sum(
        sum(row[index] * loss[index] for row, loss in zip(counts, losses, strict=True))
        / totals[index]
        for index in range(3)
    )
    assert gradient == pytest.approx(mean, abs=1e-12)


def test_several_losses_in_each_of_several_micro_steps_are_refused() -> None:
    weights = LossWeights()
    window = Window(2, serial=1, micro=1)
    weigh(weights, window, 1.0, 3)
    window.losses = 1
    with pytest.raises(StepError, match="2 times in one micro-step of a window of 2"):
        weigh(weights, window, 1.0, 3)
    # also in the last one, where the gradients of the first are added up already
    late_window = Window(2, serial=1, micro=2, losses_before=1)
    weigh(weights, late_window, 1.0, 3)
    with pytest.raises(StepError, match="2 times in one micro-step"):
        weigh(weights, late_window, 1.0, 3)
    # an epoch that ends early ends the window with its first micro-step
    short_window = Window(2, serial=1, micro=1)
    for weight in (3, 5):
        weights.weigh(short_window, torch.tensor(1.0), weight, True, [])
    assert short_window.weights == [3, 5]


def test_without_accumulate_a_window_of_several_adds_its_weights() -> None:
    weights = LossWeights()
    window = Window(3, serial=1)
    shares = [weigh(weights, window, loss, 4) for loss in (1.0, 2.0, 3.0)]
    assert window.weights == [12]
    assert sum(shares) * weights.correction(window) == pytest.approx(2.0)


def test_a_loss_after_the_gradients_were_used_is_refused() -> None:
    weights = LossWeights()
    window = Window(1, serial=7)
    # of another window, or used and not cleared: neither is in the way
    harmless = [Optimizer(6), Optimizer(7, spent=True)]
    weigh(weights, window, 1.0, 2, harmless)
    with pytest.raises(StepError, match="came after"):
        weigh(weights, window, 1.0, 2, [*harmless, Optimizer(7)])
    window = Window(1, serial=8, micro=1)
    weigh(weights, window, 1.0, 2)
    weights.correction(window)
    window.turn = 0
    with pytest.raises(StepError, match="came after"):
        weigh(weights, window, 1.0, 2)


@pytest.mark.parametrize(
    ("weight", "largest", "unit"),
    [
        (0, 0.0, 1.0),
        (1, 0.0, 1.0),
        (0.3, 0.0, 0.25),
        (100, 0.0, 128.0),
        (3, 40.0, 32.0),
        (0, 6.0, 8.0),
        (torch.tensor(5.0), 0.0, 4.0),
    ],
)
def test_the_unit_is_the_power_of_two_near_the_largest_first_weight(
    weight: Any, largest: float, unit: float
) -> None:
    group = cast(Comm, Totals(2, largest))
    assert agree_on_unit(weight, group) == unit
    if not largest:
        assert agree_on_unit(weight, None) == unit
        single_rank = cast(Comm, Totals(1, 1e9))
        assert agree_on_unit(weight, single_rank) == unit, "no one to ask"


def test_the_unit_is_that_of_the_first_window() -> None:
    weights = LossWeights()
    assert weigh(weights, Window(1, serial=1), 1.0, 64) == 1.0
    assert weigh(weights, Window(1, serial=2), 1.0, 16) == 0.25
    assert weights.unit == 64.0


@pytest.mark.parametrize(
    "weight",
    [-1, float("nan"), float("inf"), "3", None, 1j, torch.ones(2), torch.ones(0)],
)
def test_what_is_not_a_count_is_refused(weight: Any) -> None:
    with pytest.raises(ConfigError, match="weight"):
        checked_weight(weight)


@pytest.mark.parametrize("weight", [0, 0.5, 1, torch.tensor(3), torch.ones(1, 1)])
def test_counts_are_numbers_or_exact_scalars(weight: Any) -> None:
    checked = checked_weight(weight)
    assert float(checked) == float(weight)
    if isinstance(weight, Tensor):
        assert isinstance(checked, Tensor)
        assert (checked.shape, checked.dtype) == ((), torch.float64)
    else:
        assert checked is weight


def test_a_loss_without_a_weight_has_the_share_of_its_rank() -> None:
    share = torch.tensor(0.25)
    assert LossWeights().effective(None) is None
    assert LossWeights().effective(5) == 5
    assert LossWeights(share=share).effective(None) is share
    assert LossWeights(share=share).effective(5) == 5
    assert LossWeights(share=share, idle=True).effective(5) == 0.0
    assert LossWeights(idle=True).effective(None) == 0.0
