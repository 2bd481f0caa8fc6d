"""Prepared loaders of the drop-in: batches are read one ahead, and the last one is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate._impl.loaders.torch_source import OneAhead


@pytest.mark.parametrize("length", [0, 1, 2, 5])
def test_one_ahead_reads_one_further_and_knows_the_last(length: int) -> None:
    read: list[int] = []

    def batches() -> Any:
        for number in range(length):
            read.append(number)
            yield torch.tensor([number]), None, False, number

    for device in (None, torch.device("cpu")):
        read.clear()
        read_batches = []
        for batch, _, last, mark in OneAhead(device, lambda batch: batch)(batches()):
            read_batches.append((int(batch), last))
            assert mark == int(batch)
            assert len(read) == min(int(batch) + 2, length)
        assert read_batches == [
            (number, number == length - 1) for number in range(length)
        ]
