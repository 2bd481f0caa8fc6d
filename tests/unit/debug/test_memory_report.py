"""The memory report counts what is there: every byte once, under the right name."""

from __future__ import annotations

import torch
from torch import nn

from hasten.debug.memory import measure, words


def test_bytes_are_counted_once_and_by_kind() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    net[2].weight = net[0].weight  # tied: one storage
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    report = measure("out of memory", [net], [optimizer], torch.device("cpu"))
    trained = 4 * sum(p.numel() for p in net.parameters())
    assert report.held["parameters"] == report.held["gradients"] == trained
    assert report.held["optimizer state"] == 2 * trained + 4 * len(
        list(net.parameters())
    )  # two moments and a step each
    assert report.held["buffers"] == 2 * 8 * 4 + 8
    assert report.process["resident"] > 2**20


def test_activations_belong_to_the_module_that_keeps_them() -> None:
    net = nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, 2))
    report = measure("out of memory", [net], [], torch.device("cpu"))
    with report.activations([net]):
        loss = net(torch.ones(3, 4)).sum()
    loss.backward()
    assert report.by_module == {"0": 3 * 4 * 4, "1": 3 * 256 * 4}  # the second layer keeps what tanh keeps already
    assert "activations of one sample, by module:" in report.shown()
    assert report.shown().splitlines()[0].strip() == "out of memory"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_sizes_in_words() -> None:
    assert [words(size) for size in (12, 2048, 3 << 20, 5 << 30)] == ["12 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]
