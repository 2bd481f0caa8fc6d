"""The memory report counts what is there: every byte once, under the right name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hasten import Accelerator
from hasten.trust.memory import format_size, model_memory, process_memory


def test_bytes_are_counted_once_and_by_kind() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    net[2].weight = net[0].weight  # tied: one storage
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    memory = model_memory([net], [optimizer])
    trained = 4 * sum(p.numel() for p in net.parameters())
    assert memory["parameters"] == memory["gradients"] == trained
    # two moments and a step each
    assert memory["optimizer state"] == 2 * trained + 4 * len(list(net.parameters()))
    assert memory["buffers"] == 2 * 8 * 4 + 8
    assert process_memory(torch.device("cpu"))["resident"] > 2**20


def test_an_error_for_lack_of_memory_says_what_the_memory_is_used_for() -> None:
    accelerator = Accelerator(cpu=True)
    net = accelerator.prepare(nn.Linear(8, 8))
    with pytest.raises(torch.OutOfMemoryError) as raised, accelerator.accumulate(net):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert "parameters" in raised.value.__notes__[0]
    assert "process: resident" in raised.value.__notes__[0]


def test_sizes_in_words() -> None:
    assert [format_size(size) for size in (12, 2048, 3 << 20, 5 << 30)] == [
        "12 B",
        "2.0 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]
