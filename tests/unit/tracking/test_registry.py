"""Names of trackers: built-in, installed, misspelt, foreign."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hasten.errors import TrackerError
from hasten.tracking.backends.jsonl import JsonlTracker
from hasten.tracking.registry import build, installed

PLUGIN = """
from hasten.tracking.base import Entry, Tracker

class Paper(Tracker):
    name = "paper"
    def log(self, entry: Entry) -> None: ...
"""


def test_names_instances_and_lists_are_accepted() -> None:
    tracker = JsonlTracker(every_rank=True)
    assert build(None) == []
    assert build(tracker) == [tracker]
    assert [one.name for one in build("jsonl")] == ["jsonl"]
    assert [one.name for one in build(["JSONL"])] == ["jsonl"]
    assert "jsonl" in [one.name for one in build("all")]


def test_a_misspelt_name_is_told_the_nearest() -> None:
    with pytest.raises(TrackerError, match="Did you mean 'tensorboard'"):
        build("tensorbord")


def test_two_trackers_of_one_name_are_refused() -> None:
    with pytest.raises(TrackerError, match="name of its own"):
        build(["jsonl", JsonlTracker()])


def test_an_entry_point_brings_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "paper_tracker.py").write_text(PLUGIN)
    info = tmp_path / "paper-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paper\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hasten.trackers]\npaper = paper_tracker:Paper\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "paper" in installed()
    assert [tracker.name for tracker in build("paper")] == ["paper"]
    del sys.modules["paper_tracker"]
