"""Tests on a machine whose host takes the processors away: limits wait, a failure is tried again in the open, a real one stays."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from hasten.testing import processors
from hasten.testing.processors import Limit

CONFTEST: Final = Path(__file__).parents[1] / "conftest.py"
TESTS: Final = '''"""Tests that fail at first, or always."""
import pytest
tries = []

@pytest.mark.timed
def test_timed():
    tries.append("timed")
    assert tries.count("timed") == 3, "too slow"

def test_other():
    tries.append("other")
    assert tries.count("other") == 2, "no answer"

def test_broken():
    assert not "broken"
'''


def run(folder: Path, stolen: float) -> str:
    """What pytest prints about TESTS where this share of the processors' time is stolen."""
    starved = f"\n\ndef stolen_since(before):\n    return {stolen}\n\n\ndef wait_for_processors():\n    pass\n"
    (folder / "conftest.py").write_text(CONFTEST.read_text("utf-8") + starved)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    timed: clock\n")
    (folder / "test_inner.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False).stdout


def test_a_failure_is_tried_again_and_listed(tmp_path: Path) -> None:
    said = run(tmp_path, 0.8)
    assert "1 failed, 2 passed" in said, said
    assert "FAILED test_inner.py::test_broken" in said
    assert said.count("run again: test_inner.py::test_timed failed while the host of this machine gave 80%") == 2
    assert said.count("run again: test_inner.py::test_other failed while the host") == 1
    assert "no answer" in said.partition("run again: test_inner.py::test_other")[2].partition("\n")[0]


@pytest.mark.parametrize(("stolen", "outcome"), [(0.3, "2 failed, 1 passed"), (0.05, "3 failed")])
def test_a_small_share_is_no_excuse(tmp_path: Path, stolen: float, outcome: str) -> None:
    assert outcome in (said := run(tmp_path, stolen)), said


@pytest.mark.parametrize(("stolen", "longest"), [(0, 1), (50, 2), (75, 4), (100, 6)])
def test_a_limit_is_longer_by_what_was_stolen(monkeypatch: pytest.MonkeyPatch, stolen: int, longest: int) -> None:
    ticks = iter([(5, 20), (5 + stolen, 120)])
    monkeypatch.setattr(processors, "processor_time", lambda: next(ticks))
    assert Limit(100).left() == pytest.approx(100 * longest, abs=1)


def test_a_limit_ends_on_a_machine_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "processor_time", lambda: (0, 0))
    limit = Limit(0.2)
    time.sleep(0.25)
    assert limit.left() < 0
    assert Limit(3, most_s=1).left() == pytest.approx(3, abs=0.5)  # never shorter than was asked for
