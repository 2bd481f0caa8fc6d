"""The memory report counts what is there: every byte once, under the right name."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from hasten import Accelerator
from hasten.trust.memory import MemoryReport, draw, measure, parts_of, words


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


def test_an_error_for_lack_of_memory_says_what_the_memory_is_used_for() -> None:
    accelerator = Accelerator(cpu=True)
    net = accelerator.prepare(nn.Linear(8, 8))
    with pytest.raises(torch.OutOfMemoryError) as raised, accelerator.accumulate(net):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert "parameters" in raised.value.__notes__[0]
    assert "process: resident" in raised.value.__notes__[0]


def device_report() -> MemoryReport:
    gib = 1 << 30
    process = {
        "resident": gib,
        "device in use": 60 * gib,
        "device cache": 4 * gib,
        "device free": 12 * gib,
        "device": 80 * gib,
    }
    held = {"parameters": 10 * gib, "gradients": 10 * gib, "optimizer state": 20 * gib, "buffers": 0}
    return MemoryReport("CUDA <out> of memory", held, process)


def test_the_parts_of_the_picture_add_up() -> None:
    gpu, cpu = device_report(), measure("asked", [nn.Linear(4, 4)], [], torch.device("cpu"))
    assert sum(parts_of(gpu).values()) == gpu.process["device"]
    assert parts_of(gpu)["other tensors"] == 20 << 30
    assert parts_of(gpu)["other processes"] == 4 << 30
    assert sum(parts_of(cpu).values()) == cpu.process["resident"]


def test_the_picture_draws_every_part_to_scale() -> None:
    report = device_report()
    root = ElementTree.fromstring(draw(report, "memory of rank 3"))
    kind = "{http://www.w3.org/2000/svg}"
    bars = [one for one in root.iter(f"{kind}rect") if one.find(f"{kind}title") is not None]
    drawn = {one[0].text.partition(":")[0]: float(one.attrib["width"]) for one in bars if one[0].text}
    parts = parts_of(report)
    assert list(drawn) == list(parts)
    full = sum(drawn.values())
    for name, size in parts.items():
        assert abs(drawn[name] / full - size / report.process["device"]) < 1e-3
    texts = [one.text for one in root.iter(f"{kind}text")]
    assert "CUDA <out> of memory" in texts


def test_a_snapshot_is_a_picture_and_its_numbers(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=str(tmp_path))
    net = nn.Linear(64, 64)
    accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    picture = Path(accelerator.memory_snapshot())
    assert picture.parent == tmp_path
    ElementTree.fromstring(picture.read_text())
    assert json.loads(picture.with_suffix(".json").read_text())["parts"]["parameters"] == 4 * 65 * 64


def test_sizes_in_words() -> None:
    assert [words(size) for size in (12, 2048, 3 << 20, 5 << 30)] == ["12 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]
