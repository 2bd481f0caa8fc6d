"""The run log: parts of a step add up, files survive a cut, a broken disk stops the log and not the training."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hasten import Accelerator, ProjectConfiguration
from hasten.testing.toys import seeded
from hasten.tracking.run_log import PARTS, RunLog, read_run_log
from tests.support.toys import Blobs, Classifier


def train_slowly(
    folder: Path, every: int = 1, precision: str = "no", **settings: Any
) -> Accelerator:
    """A short training with slow parts."""
    accelerator = Accelerator(
        cpu=True, project_config=ProjectConfiguration(project_dir=str(folder), **settings),
        gradient_accumulation_steps=every, mixed_precision=precision,
    )  # fmt: skip
    model: Any = seeded(Classifier)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(Blobs(32), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            time.sleep(0.01)
            loss = torch.nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.002)
    return accelerator


def test_communication_is_a_part_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is taken out of the part it happens in; an average wait for gradients out of backward."""
    clock = {"now": 100.0, "collectives": 0.0}
    monkeypatch.setattr(time, "perf_counter", lambda: clock["now"])

    def passes(seconds: float) -> None:
        clock["now"] += seconds

    def collective(seconds: float) -> None:
        passes(seconds)
        clock["collectives"] += seconds

    log = RunLog(
        tmp_path, 0, dict, lambda: None, lambda: clock["collectives"], lambda: 0.01
    )
    log.batch_requested()
    log.flush()
    for _ in range(4):
        log.batch_arrived(1)
        collective(0.02)
        passes(0.005)
        log.backward_begins()
        passes(0.03)
        log.backward_done(exchanged=True)
        log.optimizer_begins()
        passes(0.004)
        log.optimizer_done()
        passes(0.001)
        log.batch_requested()
    log.close()
    (read,) = read_run_log(tmp_path)
    sums = {step_part: float(read.steps[step_part].sum()) for step_part in PARTS}
    expected = {
        "communication": 0.02 + 0.01,
        "forward": 0.005,
        "backward": 0.02,
        "optimizer": 0.004,
    }
    expected |= {"other": 0.001}
    assert {
        step_part: part_seconds
        for step_part, part_seconds in sums.items()
        if part_seconds
    } == pytest.approx(
        {step_part: 4 * part_seconds for step_part, part_seconds in expected.items()},
        rel=1e-4,
    )


def test_a_log_with_other_phases_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "rank0-1.jsonl").write_text(
        '{"event":"started","time":1.0,"rank":0,"parts":["data","other"]}\n'
    )
    assert read_run_log(tmp_path) == []


@pytest.mark.parametrize("every", [1, 2, 3])
def test_one_record_per_update_and_parts_add_up(tmp_path: Path, every: int) -> None:
    start_s = time.time()
    accelerator = train_slowly(tmp_path, every)
    accelerator.save_state()
    accelerator.end_training()
    seconds = time.time() - start_s
    (log,) = read_run_log(tmp_path / "run_log")
    assert len(log.steps) == -(-8 // every)
    assert log.steps["samples"].sum() == 32
    total = sum(float(log.steps[step_part].sum()) for step_part in PARTS)
    assert total <= seconds
    assert log.steps["forward"].sum() >= 0.08
    assert log.steps["other"].sum() >= 0.015
    assert (log.steps["backward"] > 0).all()
    assert (log.steps["optimizer"] > 0).all()
    assert (np.diff(log.steps["time"]) > 0).all()
    assert [event["event"] for event in log.events] == ["started", "saved", "ended"]
    assert log.started["settings"]["project.project_dir"][0] == str(tmp_path)
    assert "torch" in log.started["versions"]


def test_nothing_is_left_without_training_or_when_it_is_off(tmp_path: Path) -> None:
    Accelerator(cpu=True, project_dir=str(tmp_path)).end_training()
    train_slowly(tmp_path, run_log=False).end_training()
    assert not (tmp_path / "run_log").exists()


def test_a_cut_file_is_read_up_to_the_cut(tmp_path: Path) -> None:
    train_slowly(tmp_path).end_training()
    (steps,) = (tmp_path / "run_log").glob("*.steps")
    (lines,) = (tmp_path / "run_log").glob("*.jsonl")
    steps.write_bytes(steps.read_bytes()[:-7])
    lines.write_bytes(lines.read_bytes()[:-5])
    (log,) = read_run_log(tmp_path / "run_log")
    assert len(log.steps) == 7
    assert [event["event"] for event in log.events] == ["started"]


def test_a_broken_disk_stops_the_log_only(tmp_path: Path) -> None:
    (tmp_path / "run_log").write_text("a file where the folder should be")
    accelerator = train_slowly(tmp_path)
    accelerator.end_training()
    assert accelerator._run_log is not None
    assert accelerator._run_log.broken


def test_skipped_updates_are_events(tmp_path: Path) -> None:
    accelerator = Accelerator(
        cpu=True, project_dir=str(tmp_path), mixed_precision="fp16"
    )
    model: Any = seeded(Classifier)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(Blobs(8), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        accelerator.backward(
            torch.nn.functional.cross_entropy(model(x), y) * float("inf")
        )
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    (log,) = read_run_log(tmp_path / "run_log")
    assert [event["event"] for event in log.events].count("skipped") == 2


def test_marking_a_step_takes_microseconds(tmp_path: Path) -> None:
    log = RunLog(tmp_path, 0, dict, lambda: None)
    start_s = time.process_time()
    for _ in range(5000):
        log.batch_requested()
        log.batch_arrived(8)
        log.backward_begins()
        log.backward_done()
        log.optimizer_begins()
        log.optimizer_done()
    log.close()
    seconds_per_step = (time.process_time() - start_s) / 5000
    assert seconds_per_step < 50e-6
    assert len(read_run_log(tmp_path)[0].steps) == 5000
