"""Processes of notebook_launcher: they begin with the notebook's random states, and their data is compared."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.utils.data import DataLoader, TensorDataset, random_split

from accelerate import Accelerator, notebook_launcher
from accelerate.utils import gather_object

# Any in this file: what each process has drawn and read.


def draw_and_split() -> list[Any]:
    accelerator = Accelerator(cpu=True)
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    train, test = random_split(TensorDataset(torch.arange(12.0)), [8, 4])
    loader = accelerator.prepare(DataLoader(train, batch_size=2))
    read = [value for (batch,) in loader for value in batch.tolist()]
    held_out_rows = [float(test[index][0]) for index in range(4)]
    return list(gather_object([(drawn, read, held_out_rows)]))


def split_differently() -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)
    train, _ = random_split(TensorDataset(torch.arange(12.0)), [8, 4])
    accelerator.prepare(DataLoader(train, batch_size=2))


@pytest.mark.usefixtures("fresh_states")
def test_processes_begin_with_the_random_states_of_the_notebook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    results = notebook_launcher(draw_and_split, num_processes=2)
    expected = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    assert [drawn for drawn, _, _ in results] == [expected, expected]
    (_, first_read, held_out_rows), (_, second_read, second_held_out_rows) = results
    assert held_out_rows == second_held_out_rows
    assert sorted([*first_read, *second_read, *held_out_rows]) == list(range(12))


@pytest.mark.usefixtures("fresh_states")
def test_processes_with_different_data_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    with pytest.raises(ChildFailedError, match="with different data"):
        notebook_launcher(split_differently, num_processes=2)
