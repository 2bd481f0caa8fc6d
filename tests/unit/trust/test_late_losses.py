"""Losses gathered for the numbers watch: none is lost, none that weighs nothing counts, none keeps a large tensor alive."""

from __future__ import annotations

import math
import random

import pytest
import torch

from hasten.trust.numbers.late_losses import LateLosses


def test_every_loss_arrives_once_with_its_update_and_origin() -> None:
    draw = random.Random(0)
    for _ in range(50):
        losses: LateLosses[int] = LateLosses()
        expected, arrived, number = [], [], 0
        for step in range(1, draw.randint(2, 12)):
            for _ in range(draw.randint(0, 4)):
                number += 1
                weight = draw.choice([None, 0, 0.5, torch.tensor(0.0), torch.tensor(3)])
                losses.add(torch.tensor(float(number)), weight, number, step)
                counts = weight is None or float(weight) != 0
                expected.append((step, float(number) if counts else 0.0, number))
                if draw.random() < 0.2:  # also between two losses of one update
                    arrived += losses.copy()
        arrived += losses.read_all()
        arrived_losses = [
            (arrival.step, value, origin)
            for arrival in arrived
            for value, (*_, origin) in zip(arrival.values, arrival.losses, strict=True)
        ]
        assert arrived_losses == expected


def test_it_is_time_to_copy_after_256_losses() -> None:
    losses: LateLosses[None] = LateLosses()
    due_flags = [losses.add(torch.tensor(1.0), None, None, step) for step in range(256)]
    assert due_flags[-1]
    assert len(losses.take_collected().losses) == 256
    assert losses.read_all() == []


def test_a_loss_that_weighs_nothing_is_zero_even_if_it_is_nan() -> None:
    losses: LateLosses[None] = LateLosses()
    losses.add(torch.tensor(float("nan")), torch.tensor(0), None, 1)
    losses.add(torch.tensor(2.0), 1.0, None, 1)
    assert losses.read_all()[0].values == [0.0, 2.0]


def test_losses_that_came_with_one_that_is_not_finite_are_all_given() -> None:
    losses: LateLosses[None] = LateLosses(odd_only=True)
    for number, value in enumerate((1.0, 3e38, 3e38, 2.0, float("inf"), float("nan"))):
        losses.add(torch.tensor(value), None, None, number)
        if number == 1:
            assert losses.read_all() == [], "finite losses are of no interest"
    (a, b, c, d) = losses.read_all()
    assert a.values == [pytest.approx(3e38)]
    assert b.values + c.values == [2.0, float("inf")]
    assert d.step == 5
    assert math.isnan(d.values[0])


def test_a_part_of_a_large_tensor_is_copied_out_of_it() -> None:
    losses: LateLosses[None] = LateLosses()
    losses.add(torch.ones(100_000)[7], None, None, 1)
    assert losses.take_collected().losses[0][0].untyped_storage().nbytes() == 4


def test_a_loss_whose_memory_is_used_again_is_copied_at_once() -> None:
    for overwritten in (False, True):
        losses: LateLosses[None] = LateLosses(overwritten)
        output = torch.zeros(())
        for step in (1, 2):
            output.fill_(step)
            losses.add(output, None, None, step)
        assert [update.values for update in losses.read_all()] == (
            [[1.0], [2.0]] if overwritten else [[2.0], [2.0]]
        )
