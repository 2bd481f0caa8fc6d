"""The manager: late reading, order, guarded failures, main process by construction, resume."""

from __future__ import annotations

import argparse
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hasten import Accelerator
from hasten.errors import HastenWarning, TrackerError
from hasten.tracking.base import Entry, ImageEntry, Run, TableEntry, Tracker
from hasten.tracking.manager import TrackerManager
from hasten.tracking.writer import DummyTracker


class ListTracker(Tracker):
    """An own tracker, as small as the documentation says."""

    name = "list"

    def __init__(self) -> None:
        self.run: Run | None = None
        self.entries: list[Entry] = []
        self.media_entries: list[ImageEntry | TableEntry] = []
        self.rewound: list[int] = []
        self.ended: list[bool] = []

    def start(self, run: Run) -> str:
        self.run = run
        return super().start(run)

    def log(self, entry: Entry) -> None:
        self.entries.append(entry)

    def log_images(self, entry: ImageEntry) -> None:
        self.media_entries.append(entry)

    def log_table(self, entry: TableEntry) -> None:
        self.media_entries.append(entry)

    def rewind(self, step: int) -> None:
        self.rewound.append(step)

    def finish(self, failed: bool) -> None:
        self.ended.append(failed)


class BrokenTracker(Tracker):
    """Raises wherever it is told to."""

    name = "broken"

    def __init__(self, where: Sequence[str]) -> None:
        self.where = where

    def start(self, run: Run) -> str:
        self._maybe("start")
        return "id"

    def log(self, entry: Entry) -> None:
        self._maybe("log")

    def finish(self, failed: bool) -> None:
        self._maybe("finish")

    def _maybe(self, where: str) -> None:
        if where in self.where:
            raise RuntimeError(f"no network in {where}")


def test_values_reach_the_tracker_as_plain_numbers_in_order() -> None:
    tracker = ListTracker()
    manager = TrackerManager([tracker])
    manager.init("project", {"lr": 0.1})
    for step in range(5):
        manager.log(
            {
                "loss": torch.tensor(float(step), requires_grad=True),
                "nested": {"lr": np.float32(0.5)},
            },
            step=step,
        )
    manager.finish()
    assert [entry.step for entry in tracker.entries] == [0, 1, 2, 3, 4]
    assert [entry.values["loss"] for entry in tracker.entries] == [
        0.0,
        1.0,
        2.0,
        3.0,
        4.0,
    ]
    assert all(type(entry.values["loss"]) is float for entry in tracker.entries)
    assert tracker.entries[0].values["nested/lr"] == 0.5
    assert tracker.ended == [False]


class DeviceNumber:
    """A number on a device: reading it would wait for the device."""

    is_cpu = False

    def numel(self) -> int:
        return 1

    def detach(self) -> DeviceNumber:
        return self

    def clone(self) -> DeviceNumber:
        return self

    def __float__(self) -> float:
        return 1.0

    def item(self) -> float:
        return 1.0


def test_tensors_are_not_read_before_a_flush() -> None:
    reads: list[int] = []

    def fetch(tensors: Sequence[Any]) -> list[float]:
        reads.append(len(tensors))
        return [float(tensor) for tensor in tensors]

    manager = TrackerManager([ListTracker()], fetch=fetch, flush_every_s=1000.0)
    manager.init("project")
    for _ in range(100):
        manager.log({"loss": DeviceNumber(), "on the host": torch.tensor(2.0)})
    assert reads == [1], "the first record goes out at once, the others wait"
    manager.finish()
    assert reads == [1, 99], "and are read together"


def test_values_are_written_while_the_script_does_something_else() -> None:
    tracker = ListTracker()
    manager = TrackerManager([tracker], flush_every_s=0.2)
    manager.init("project")
    for step in range(3):
        manager.log({"loss": DeviceNumber() if step == 2 else 1.0}, step=step)
    until = time.monotonic() + 10.0
    while len(tracker.entries) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    assert [entry.step for entry in tracker.entries] == [0, 1, 2]
    manager.log({"loss": 2.0})
    manager.send()
    manager.finish()
    assert [entry.step for entry in tracker.entries] == [0, 1, 2, 3]


def test_a_value_changed_in_place_later_is_logged_as_it_was() -> None:
    tracker, total = ListTracker(), torch.zeros(())
    manager = TrackerManager([tracker], flush_every_s=1000.0)
    manager.init("project")
    for _ in range(3):
        total += 1
        manager.log({"total": total})
    manager.finish()
    assert [entry.values["total"] for entry in tracker.entries] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("where", ["start", "log", "finish"])
def test_a_failing_tracker_warns_once_and_the_others_go_on(where: str) -> None:
    good = ListTracker()
    manager = TrackerManager([BrokenTracker([where]), good])
    manager.init("project")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(10):
            manager.log({"loss": 1.0}, step=step)
            manager.flush()
        manager.finish()
    assert [
        str(w.message) for w in caught if f"failed in {where}" in str(w.message)
    ] == [str(w.message) for w in caught]
    assert len(caught) == 1
    assert issubclass(caught[0].category, HastenWarning)
    assert len(good.entries) == 10


def test_only_the_main_process_logs_and_others_get_a_silent_stand_in() -> None:
    tracker = ListTracker()
    manager = TrackerManager([tracker], is_main=False)
    manager.init("project")
    manager.log({"loss": 1.0})
    stand_in = manager.get("list", unwrap=True)
    assert isinstance(stand_in, DummyTracker)
    assert not stand_in.config.update({"a": 1})
    manager.finish()
    assert tracker.run is None


def test_a_checkpoint_loaded_before_the_first_log_continues_its_run() -> None:
    first = ListTracker()
    manager = TrackerManager([first])
    manager.init("project")
    for step in range(5):
        manager.log({"loss": 1.0}, step=step)
    state = manager.state_dict()
    manager.finish()

    second = ListTracker()
    manager = TrackerManager([second])
    manager.init("project")
    manager.load_state_dict(state)
    manager.log({"loss": 2.0})
    manager.finish()
    assert first.run is not None
    assert second.run is not None
    assert second.run.resume is not None
    assert (second.run.run_id, second.run.resume.step) == (first.run.run_id, 4)
    assert second.entries[0].step == 5, "steps not given go on counting"


def test_a_checkpoint_of_the_open_run_rewinds_it() -> None:
    tracker = ListTracker()
    manager = TrackerManager([tracker])
    manager.init("project")
    manager.log({"loss": 1.0}, step=3)
    state = manager.state_dict()
    manager.log({"loss": 1.0}, step=9)
    manager.load_state_dict(state)
    manager.finish()
    assert tracker.rewound == [3]


def test_a_run_that_was_started_at_once_is_begun_again_when_nothing_was_logged() -> (
    None
):
    tracker = ListTracker()
    manager = TrackerManager([tracker])
    manager.init("project")
    assert manager.trackers, "they are started"
    manager.load_state_dict(
        {"version": 1, "run_id": "old", "step": 7, "runs": {"list": "old-id"}}
    )
    manager.log({"loss": 1.0})
    manager.finish()
    assert tracker.run is not None
    assert tracker.run.resume is not None
    assert tracker.run.resume.run_id == "old-id"
    assert tracker.entries[0].step == 8


def test_a_late_resume_warns() -> None:
    manager = TrackerManager([ListTracker()])
    manager.init("project")
    manager.log({"loss": 1.0})
    with pytest.warns(HastenWarning, match="before the first log"):
        manager.load_state_dict({"version": 1, "run_id": "old", "step": 7, "runs": {}})
    manager.finish()


def test_what_is_not_a_number_is_dropped_with_one_warning() -> None:
    tracker = ListTracker()
    manager = TrackerManager([tracker])
    manager.init("project")
    with pytest.warns(HastenWarning, match="Reduce it first"):
        manager.log({"loss": torch.zeros(3), "good": 1})
    # a second warning would be an error here
    manager.log({"loss": torch.zeros(3), "good": 2})
    manager.finish()
    assert [entry.values for entry in tracker.entries] == [{"good": 1}, {"good": 2}]


def test_log_before_init_is_an_error_and_without_trackers_nothing() -> None:
    with pytest.raises(TrackerError, match="init_trackers"):
        TrackerManager([ListTracker()]).log({"loss": 1.0})
    TrackerManager([]).log({"loss": 1.0})


def test_unknown_names_are_errors() -> None:
    manager = TrackerManager([ListTracker()])
    with pytest.raises(TrackerError, match="names passed to log_with"):
        manager.init("project", init_kwargs={"lst": {}})
    with pytest.raises(TrackerError, match="no tracker"):
        manager.get("lst")


def test_options_reach_their_tracker_only() -> None:
    first_tracker, second_tracker = ListTracker(), ListTracker()
    second_tracker.name = "two"
    manager = TrackerManager([first_tracker, second_tracker])
    manager.init(
        "project",
        argparse.Namespace(lr=0.1, path=Path("a")),
        {"two": {"mode": "offline"}},
    )
    manager.log({"loss": 1.0}, log_kwargs={"two": {"commit": False}})
    manager.finish()
    assert first_tracker.run is not None
    assert second_tracker.run is not None
    assert (first_tracker.run.options, second_tracker.run.options) == (
        {},
        {"mode": "offline"},
    )
    assert first_tracker.run.config == {"lr": 0.1, "path": "a"}
    assert (first_tracker.entries[0].options, second_tracker.entries[0].options) == (
        {},
        {"commit": False},
    )


def test_images_and_tables_arrive_in_one_form() -> None:
    tracker = ListTracker()
    manager = TrackerManager([tracker])
    manager.init("project")
    manager.log_images({"a": torch.rand(2, 3, 4, 5), "b": np.zeros((4, 5), np.uint8)})
    manager.log_table("t", ["x", "y"], [[torch.tensor(1.5), None], ["a", 2]])
    manager.finish()
    images, table = tracker.media_entries
    assert isinstance(images, ImageEntry)
    assert [image.shape for image in images.images["a"]] == [(4, 5, 3), (4, 5, 3)]
    assert images.images["b"][0].shape == (4, 5, 1)
    assert isinstance(table, TableEntry)
    assert table.rows == [[1.5, None], ["a", 2]]


def test_a_second_init_ends_the_first_run() -> None:
    tracker = ListTracker()
    manager = TrackerManager([tracker])
    for _ in range(3):
        manager.init("fold")
        manager.log({"loss": 1.0})
    manager.finish()
    assert tracker.ended == [False, False, False]


def test_a_hanging_tracker_does_not_stop_training() -> None:
    class HangingTracker(ListTracker):
        def log(self, entry: Entry) -> None:
            gate.wait()

    gate = threading.Event()
    manager = TrackerManager([HangingTracker()], flush_every_s=0.0)
    manager.init("project")
    with pytest.warns(HastenWarning, match="far behind"):  # noqa: PT031  the queue is full after a thousand records
        for _ in range(1100):
            manager.log({"loss": 1.0})
    gate.set()
    manager.finish()


def test_a_folder_that_cannot_hold_files_is_found_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    accelerator = Accelerator(
        cpu=True, project_dir=str(tmp_path / "file" / "runs"), log_with="jsonl"
    )
    with pytest.raises(TrackerError, match="give another project_dir"):
        accelerator.init_trackers("run")
