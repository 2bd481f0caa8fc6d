"""Goodput: every second has one cause, and the causes add up to the wall time, over restarts and rollbacks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hasten import Accelerator
from hasten.accelerator.setup import RunLogPart
from hasten.extensions.report.report_data import cause_rows
from hasten.testing.toys import seeded
from hasten.tracking.goodput import Goodput, account_time, goodput_of_run
from hasten.tracking.run_log import LoggedRank, RunLog, read_run_log, step_dtype
from tests.support.toys import Blobs, Classifier


def program_start(
    process_start: float,
    first: float,
    steps: int,
    events: Sequence[dict[str, Any]] = (),
    rank: int = 0,
    **step_shares: float,
) -> LoggedRank:
    """A start of the program: steps of one second, all useful but for `step_shares`, from second `first` on."""
    table = np.zeros(steps, step_dtype())
    table["time"] = first + 1.0 + np.arange(steps)
    table["forward"] = 1.0 - sum(step_shares.values())
    for step_part, seconds in step_shares.items():
        table[step_part] = seconds
    started = {
        "event": "started",
        "time": process_start + 0.5,
        "process_began": process_start,
        "startup_s": first - process_start,
    }
    return LoggedRank(rank, table, [started, *events])


def seconds_by_cause(goodput: Goodput) -> dict[str, float]:
    """The causes that took time."""
    return {
        cause: round(spent, 3)
        for cause, spent in goodput.seconds.items()
        if spent > 1e-6
    }


def test_one_start() -> None:
    goodput = account_time([program_start(0.0, 5.0, 10, data=0.2, evaluation=0.1)])
    assert seconds_by_cause(goodput) == {
        "useful": 7.0,
        "startup": 5.0,
        "data": 2.0,
        "evaluation": 1.0,
    }
    assert goodput.wall_s == pytest.approx(15.0)
    assert goodput.ratio == pytest.approx(7 / 15)


def test_a_restart_from_a_checkpoint() -> None:
    """Saved after 6 of 10 steps, lost at second 15, started again at 20, loaded, four steps repeated."""
    first = program_start(0.0, 5.0, 10, [{"event": "saved", "time": 11.0, "step": 6}])
    second = program_start(
        20.0, 23.0, 4, [{"event": "loaded", "time": 22.0, "step": 6}]
    )
    goodput = account_time([first, second])
    assert seconds_by_cause(goodput) == {
        "useful": 10.0,
        "startup": 8.0,
        "restart": 5.0,
        "replayed": 4.0,
    }
    assert goodput.wall_s == pytest.approx(27.0)


def test_a_restart_from_nothing_makes_all_earlier_steps_void() -> None:
    goodput = account_time([program_start(0.0, 5.0, 10), program_start(15.0, 16.0, 3)])
    assert seconds_by_cause(goodput) == {
        "useful": 3.0,
        "startup": 6.0,
        "replayed": 10.0,
    }
    crashed = account_time(
        [
            program_start(0.0, 5.0, 10),
            program_start(15.0, 16.0, 0),
            program_start(16.0, 17.0, 1),
        ]
    )
    assert crashed.seconds["replayed"] == 10.0, "counted once"


def test_a_start_without_a_step_makes_nothing_void() -> None:
    assert (
        account_time(
            [program_start(0.0, 5.0, 10), program_start(15.0, 16.0, 0)]
        ).seconds["useful"]
        == 10.0
    )


def test_a_copy_in_memory_has_no_event_of_its_save() -> None:
    second = program_start(
        20.0, 21.0, 4, [{"event": "loaded", "time": 20.5, "step": 7}]
    )
    assert (
        account_time([program_start(0.0, 5.0, 10), second]).seconds["replayed"] == 3.0
    )


def test_a_rollback_inside_one_start() -> None:
    events = [
        {"event": "saved", "time": 7.0, "step": 2},
        {"event": "loaded", "time": 9.5, "step": 2},
        {"event": "saved", "time": 12.0, "step": 4},
    ]
    goodput = account_time([program_start(0.0, 5.0, 10, events)])
    assert goodput.seconds["replayed"] == 2.0
    assert goodput.seconds["useful"] == 8.0


def test_the_same_step_saved_again_after_a_rollback() -> None:
    events = [
        {"event": "saved", "time": 7.0, "step": 2},
        {"event": "loaded", "time": 9.5, "step": 2},
        {"event": "saved", "time": 9.6, "step": 2},
        {"event": "loaded", "time": 12.5, "step": 2},
    ]
    assert (
        account_time([program_start(0.0, 5.0, 10, events)]).seconds["replayed"] == 5.0
    )


def test_a_finished_run_that_is_continued_later_did_not_wait() -> None:
    first = program_start(
        0.0,
        5.0,
        10,
        [
            {"event": "saved", "time": 15.0, "step": 10},
            {"event": "ended", "time": 15.5},
        ],
    )
    second = program_start(
        1000.0, 1001.0, 5, [{"event": "loaded", "time": 1000.5, "step": 10}]
    )
    assert seconds_by_cause(account_time([first, second])) == {
        "useful": 15.0,
        "startup": 6.0,
        "other": 0.5,
    }


def test_a_stall_that_ended_the_process() -> None:
    goodput = account_time(
        [
            program_start(
                0.0, 5.0, 10, [{"event": "stalled", "time": 75.0, "seconds": 60.0}]
            ),
            program_start(80.0, 82.0, 1),
        ]
    )
    assert goodput.seconds["stall"] == 60.0
    assert goodput.seconds["restart"] == 5.0


def test_causes_add_up_for_random_histories() -> None:
    chance = np.random.default_rng(0)
    for _ in range(200):
        logs, clock_s = [], 0.0
        saved: list[int] = []
        for _ in range(int(chance.integers(1, 5))):
            clock_s += float(chance.uniform(0, 3))
            first, steps, events = (
                clock_s + float(chance.uniform(0, 3)),
                int(chance.integers(0, 6)),
                [],
            )
            if saved and chance.random() < 0.7:
                events.append(
                    {
                        "event": "loaded",
                        "time": first - 0.01,
                        "step": int(chance.choice(saved)),
                    }
                )
            if steps and chance.random() < 0.7:
                saved.append(int(chance.integers(1, 9)))
                events.append(
                    {
                        "event": "saved",
                        "time": first + float(chance.uniform(0, steps)),
                        "step": saved[-1],
                    }
                )
            logs.append(
                program_start(clock_s, first, steps, events, data=0.25, checkpoint=0.05)
            )
            clock_s = max(first + steps, *(event["time"] for event in logs[-1].events))
        goodput = account_time(logs)
        assert min(goodput.seconds.values()) >= 0
        run_start = float(logs[0].started["process_began"])
        assert goodput.wall_s == pytest.approx(clock_s - run_start, abs=1e-3)


def test_the_run_is_its_lowest_rank() -> None:
    ranks = [program_start(0.0, 5.0, 10), program_start(0.0, 5.0, 10, rank=1, data=0.5)]
    goodput = goodput_of_run(ranks)
    assert goodput is not None
    assert goodput.seconds["data"] == 5.0
    assert goodput_of_run([program_start(0.0, 5.0, 0)]) is None
    rows = cause_rows(goodput)
    assert rows[0][:3] == ["useful", "5 s", "33.3%"]
    assert {row[0] for row in rows} == {"useful", "startup", "data"}


def test_a_training_with_evaluation_saves_and_a_resume(tmp_path: Path) -> None:
    """The times of a real run: what was slow on purpose is found under its cause."""
    for turn in range(2):
        accelerator = Accelerator(cpu=True, project_dir=str(tmp_path))
        model: Any = seeded(Classifier)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        loader: Any = DataLoader(Blobs(32), batch_size=4)
        valid: Any = DataLoader(Blobs(16), batch_size=4)
        model, optimizer, loader, valid = accelerator.prepare(
            model, optimizer, loader, valid
        )
        accelerator.load_state(must_exist=False)
        assert accelerator._run_log is not None
        # after the start before
        accelerator._run_log.process_began_s = time.time() - 0.2
        for number, (x, y) in enumerate(loader):
            accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.02)
            if number == 3:
                accelerator.save_state()
                for x, _ in valid:
                    model(x)
                    time.sleep(0.05)
        if turn == 0:
            accelerator._run_log.flush()  # and then lost, without an end
        else:
            accelerator.end_training()
    logs = read_run_log(tmp_path / "run_log")
    goodput = account_time(logs)
    assert goodput.seconds["evaluation"] >= 2 * 4 * 0.05
    assert goodput.seconds["useful"] >= 8 * 0.02 * 0.9
    assert goodput.seconds["replayed"] >= 3 * 0.02
    assert goodput.seconds["checkpoint"] > 0
    assert goodput.seconds["startup"] >= 0.4
    assert [float(log.steps["samples"].sum()) for log in logs] == [32.0, 16.0], (
        "an evaluation's are not counted"
    )


def test_a_stall_moves_from_the_phase_it_happened_in(tmp_path: Path) -> None:
    log = RunLog(tmp_path, 0, dict, lambda: None)
    log.batch_requested()
    log.batch_arrived(1)
    log.backward_begins()
    time.sleep(0.1)
    log.backward_done()
    log.optimizer_begins()
    log.optimizer_done()
    log.record_stall(0.08, over=False)
    log.record_stall(0.09, over=True)
    log.batch_requested()
    assert log.spent["stall"] == pytest.approx(0.09)
    assert log.spent["backward"] < 0.09
    assert log.num_stalls == 1


def test_batches_read_side_by_side_are_no_evaluation() -> None:
    """Two loaders in one step: each one's batch is used before it is asked for the next."""
    accelerator = Accelerator(cpu=True, metrics={"port": 0})
    model: Any = seeded(Classifier)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    first: Any = DataLoader(Blobs(16), batch_size=4)
    second: Any = DataLoader(Blobs(16), batch_size=4)
    model, optimizer, first, second = accelerator.prepare(
        model, optimizer, first, second
    )
    for (x, y), _ in zip(first, second, strict=True):
        accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    (run_log,) = [
        run_part.run_log
        for run_part in accelerator._clock.parts.members
        if isinstance(run_part, RunLogPart)
    ]
    assert run_log.spent["evaluation"] == 0.0
    accelerator.end_training()
