"""Losses gathered for the numbers watch: none is lost, none that weighs nothing counts, none keeps a large tensor alive."""

from __future__ import annotations

import random

import torch

from hasten.debug.late_losses import LateLosses


def test_every_loss_arrives_once_with_its_update_and_origin() -> None:
    draw = random.Random(0)
    for _ in range(50):
        losses: LateLosses[int] = LateLosses()
        expected, arrived, number = [], [], 0
        for step in range(1, draw.randint(2, 12)):
            values = []
            for _ in range(draw.randint(0, 4)):
                number += 1
                weight = draw.choice([None, 0, 0.5, torch.tensor(0.0), torch.tensor(3)])
                losses.add(torch.tensor(float(number)), weight, number)
                counts = weight is None or float(weight) != 0
                values.append((float(number) if counts else 0.0, number))
            if values:
                expected.append((step, values))
            arrived += losses.close(step)
        arrived += losses.rest()
        got = [(one.step, list(zip(one.values, [origin for *_, origin in one.losses], strict=True))) for one in arrived]
        assert got == expected


def test_a_loss_that_weighs_nothing_is_zero_even_if_it_is_nan() -> None:
    losses: LateLosses[None] = LateLosses()
    losses.add(torch.tensor(float("nan")), torch.tensor(0), None)
    losses.add(torch.tensor(2.0), 1.0, None)
    assert losses.close(1)[0].values == [0.0, 2.0]


def test_a_part_of_a_large_tensor_is_copied_out_of_it() -> None:
    losses: LateLosses[None] = LateLosses()
    losses.add(torch.ones(100_000)[7], None, None)
    assert losses.take().losses[0][0].untyped_storage().nbytes() == 4
