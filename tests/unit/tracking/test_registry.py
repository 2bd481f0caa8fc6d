"""Names of trackers: of extensions, misspelt, foreign."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hasten import extension
from hasten.errors import TrackerError
from hasten.tracking.jsonl import JsonlTracker
from hasten.tracking.registry import build_trackers, tracker_names

PLUGIN = """
from hasten.extension import Extension
from hasten.tracking.base import Entry, Tracker

class Paper(Tracker):
    name = "paper"
    def log(self, entry: Entry) -> None: ...

places = {"paper": "paper_tracker:Paper", "stone": "builtins:dict"}
extension = Extension(name="paper", summary="lines on paper", trackers=places)
"""


def test_names_instances_and_lists_are_accepted() -> None:
    tracker = JsonlTracker()
    assert build_trackers(None) == []
    assert build_trackers(tracker) == [tracker]
    assert [built_tracker.name for built_tracker in build_trackers("jsonl")] == [
        "jsonl"
    ]
    assert [built_tracker.name for built_tracker in build_trackers(["JSONL"])] == [
        "jsonl"
    ]
    assert "jsonl" in [built_tracker.name for built_tracker in build_trackers("all")]


def test_a_misspelt_name_is_told_the_nearest() -> None:
    with pytest.raises(TrackerError, match="Did you mean 'tensorboard'"):
        build_trackers("tensorbord")


def test_two_trackers_of_one_name_are_refused() -> None:
    with pytest.raises(TrackerError, match="a different name"):
        build_trackers(["jsonl", JsonlTracker()])


@pytest.fixture
def paper_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package whose extension has two trackers."""
    (tmp_path / "paper_tracker.py").write_text(PLUGIN)
    info = tmp_path / "paper-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paper\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[hasten.extensions]\npaper = paper_tracker:extension\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    extension.installed.cache_clear()
    yield
    extension.installed.cache_clear()
    sys.modules.pop("paper_tracker", None)


@pytest.mark.usefixtures("paper_package")
def test_an_extension_brings_a_tracker() -> None:
    assert "paper" in tracker_names()
    assert [tracker.name for tracker in build_trackers("paper")] == ["paper"]
    with pytest.raises(
        TrackerError,
        match="extension 'paper' offers <class 'dict'> as the tracker 'stone'",
    ):
        build_trackers("stone")
