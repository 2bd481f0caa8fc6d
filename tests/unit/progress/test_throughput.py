"""Tokens a second and MFU: tokens counted from batches, and where both are shown."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hasten import Accelerator
from hasten.errors import ConfigError
from hasten.extensions.report import report_data
from hasten.extensions.report.run_folder import read_run
from hasten.progress.meter import MeterReading
from hasten.progress.text import progress_line
from hasten.progress.throughput import Throughput
from hasten.runtime.hardware import KNOWN

TOKENS, WIDTH = 5, 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layer(x)
        return hidden


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "x": torch.full((TOKENS, WIDTH), float(index)),
            "labels": torch.zeros(TOKENS, dtype=torch.long),
        }


def train_and_track(
    accelerator: Accelerator,
    net: nn.Module,
    batches: int = 8,
    batch_size: int = 2,
    wait_s: float = 0.0,
    **options: Any,
) -> Throughput:
    """Train on as many batches; returns the throughput."""
    net, optimizer, loader = accelerator.prepare(
        net,
        torch.optim.SGD(net.parameters(), lr=1e-3),
        DataLoader(Samples(batches * batch_size), batch_size=batch_size),
    )
    throughput = accelerator.track_throughput(**options)
    for batch in loader:
        with accelerator.accumulate(net):
            accelerator.backward(net(batch["x"]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(wait_s)
    return throughput


def test_rates_follow_the_clock_and_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_readings = iter(range(100, 10_000, 2))  # an update every two seconds
    monkeypatch.setattr(
        "hasten.progress.throughput.time.perf_counter", lambda: next(clock_readings)
    )
    # 1000 operations a second
    throughput = train_and_track(
        Accelerator(cpu=True), Net(), peak_tflops=1e-9, flops_per_token=50.0
    )
    assert throughput.updates_per_second == 0.5
    assert throughput.tokens_per_second == 0.5 * 2 * TOKENS
    assert throughput.mfu == pytest.approx(50 * 5 / 1000)
    assert throughput.status() == {
        "tokens_per_second": throughput.tokens_per_second,
        "mfu": throughput.mfu,
    }


def test_tokens_are_counted_from_the_field_or_by_the_function_named() -> None:
    assert (
        train_and_track(Accelerator(cpu=True), Net(), tokens="x")._tokens
        == 8 * 2 * TOKENS * WIDTH
    )
    assert (
        train_and_track(Accelerator(cpu=True), Net(), tokens=lambda batch: 7)._tokens
        == 8 * 7
    )
    with pytest.raises(
        ConfigError,
        match=r"tokens='words'.*does not have \(x, labels\).*give a function",
    ):
        train_and_track(Accelerator(cpu=True), Net(), tokens="words")


@pytest.mark.parametrize("every", [1, 2, 4])
def test_a_window_of_several_batches_is_one_update(every: int) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=every)
    throughput = train_and_track(accelerator, Net(), batches=4 * every)
    assert (throughput._updates, throughput._tokens) == (4, 4 * every * 2 * TOKENS)


def test_an_unknown_peak_leaves_mfu_out() -> None:
    cases: list[Any] = [{"flops_per_token": 50.0}, {"peak_tflops": 1.0}]
    for options in cases:
        throughput = train_and_track(Accelerator(cpu=True), Net(), **options)
        assert throughput.mfu is None
        assert list(throughput.status()) == ["tokens_per_second"]


def test_an_evaluation_between_updates_is_not_counted() -> None:
    accelerator = Accelerator(cpu=True)
    net = Net()
    net, optimizer, loader, evaluation_loader = accelerator.prepare(
        net,
        torch.optim.SGD(net.parameters(), lr=1e-3),
        DataLoader(Samples(8), batch_size=2),
        DataLoader(Samples(6)),
    )
    throughput = accelerator.track_throughput()
    for batch in loader:
        for evaluation_batch in evaluation_loader:
            with torch.no_grad():
                net(evaluation_batch["x"])
        accelerator.backward(net(batch["x"]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert throughput._tokens == 8 * TOKENS


def test_a_measurement_can_be_ended() -> None:
    accelerator = Accelerator(cpu=True)
    throughput = train_and_track(accelerator, Net(), batches=4)
    throughput.detach()
    assert throughput not in accelerator._clock.parts.members


def test_it_costs_nothing_until_it_is_asked_for() -> None:
    run_parts = Accelerator(cpu=True)._clock.parts
    assert (run_parts.after_update, run_parts.status, run_parts.log) == ((), (), ())


def test_trackers_and_reports_get_the_values(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=str(tmp_path), log_with="jsonl")
    accelerator.init_trackers("run")
    net = Net()
    net, optimizer, loader = accelerator.prepare(
        net,
        torch.optim.SGD(net.parameters(), lr=1e-3),
        DataLoader(Samples(16), batch_size=2),
    )
    accelerator.track_throughput(peak_tflops=1.0, flops_per_token=50.0)
    for step, batch in enumerate(loader):
        loss = net(batch["x"]).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss}, step=step)
    accelerator.end_training()
    lines = [
        json.loads(text)
        for file in tmp_path.rglob("*.jsonl")
        for text in file.read_text().splitlines()
    ]
    throughput_lines = [line for line in lines if "mfu" in json.dumps(line)]
    assert throughput_lines, lines[:3]
    titles = [chart["title"] for chart in report_data.all_charts([read_run(tmp_path)])]
    assert {"mfu", "tokens_per_second"} <= set(titles)


def test_progress_shows_the_values() -> None:
    text = progress_line(MeterReading(step=3, tokens_per_s=1200.0, mfu=0.541))
    assert "1.2k tok/s | mfu 54.1%" in text
    accelerator = Accelerator(cpu=True)
    net = Net()
    net, optimizer, loader = accelerator.prepare(
        net,
        torch.optim.SGD(net.parameters(), lr=1e-3),
        DataLoader(Samples(16), batch_size=2),
    )
    accelerator.track_throughput(peak_tflops=1.0, flops_per_token=50.0)
    shown = io.StringIO()
    for batch in accelerator.progress(loader, console=Console(file=shown), every_s=0.0):
        accelerator.backward(net(batch["x"]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert "mfu " in shown.getvalue().splitlines()[-1]
    assert " tok/s" in shown.getvalue().splitlines()[-1]


def test_wrong_numbers_are_named() -> None:
    accelerator = Accelerator(cpu=True)
    for wrong in (
        {"peak_tflops": 0.0},
        {"flops_per_token": -1.0},
        {"peak_tflops": float("nan")},
    ):
        with pytest.raises(
            ConfigError, match=r"is not a positive number.*give the device's dense peak"
        ):
            accelerator.track_throughput(**wrong)  # type: ignore[arg-type]


def test_the_table_gives_the_peak_of_each_dtype() -> None:
    h200 = KNOWN["h200"]
    assert h200.peak("bf16") == 989e12
    assert h200.peak("fp8") == 1979e12
    assert h200.peak("fp32") == 67e12
    assert h200.peak("fp32", tf32=True) == 494e12
    assert h200.flops("bf16") == 989e12 * h200.matmul_share
    assert h200.flops("fp32") == 67e12 * h200.fp32_share
