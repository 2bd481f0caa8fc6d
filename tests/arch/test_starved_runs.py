"""Tests on a machine whose host takes the processors away: limits wait, a failure is run again once, in the open."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from tests.support import processors
from tests.support.processors import Limit

CONFTEST: Final = Path(__file__).parents[1] / "conftest.py"
TESTS: Final = '''"""Tests that fail once, twice or always."""
import pytest
tries = []

@pytest.mark.timed
def test_timed():
    tries.append("timed")
    assert tries.count("timed") == 2, "too slow"

def test_other():
    tries.append("other")
    assert tries.count("other") == 2, "no answer"

@pytest.mark.timed
def test_third_time():
    tries.append("third")
    assert tries.count("third") >= 3, "not twice"

def test_broken():
    assert not "broken"

def test_fine():
    assert "fine"
'''
MANY_FAILURES: Final = '''"""More tests that fail once than a run may repeat."""
import pytest
tries = []

@pytest.mark.parametrize("number", range(8))
def test_once(number):
    tries.append(number)
    assert tries.count(number) == 2, f"number {number} was late"
'''


def run(folder: Path, stolen: float, tests: str = TESTS, *options: str) -> str:
    """Return the output of pytest for `tests` where this share of the processors' time is stolen."""
    starved = f"\n\ndef stolen_since(before):\n    return {stolen}\n\n\ndef wait_for_processors():\n    pass\n"
    (folder / "conftest.py").write_text(CONFTEST.read_text("utf-8") + starved)
    (folder / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {Path(__file__).parents[2]}\nmarkers =\n    timed: clock\n"
    )
    (folder / "test_inner.py").write_text(tests)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
        str(folder),
        *options,
    ]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=folder, check=False
    ).stdout


def test_a_failure_is_run_again_once_and_listed(tmp_path: Path) -> None:
    report = run(tmp_path, 0.8)
    assert "2 failed, 3 passed" in report, report
    assert "4 of at most 4 tests run again on a starved host" in report
    lines = [
        line
        for line in report.splitlines()
        if line.startswith(("run again:", "FAILED TWICE:"))
    ]
    why = "failed while the host of this machine gave 80% of the processors' time to others"
    expected = {
        "run again: test_inner.py::test_timed": "too slow",
        "run again: test_inner.py::test_other": "no answer",
        "FAILED TWICE: test_inner.py::test_third_time": "not twice",
        "FAILED TWICE: test_inner.py::test_broken": "broken",
    }
    assert len(lines) == len(expected), report
    for start, reason in expected.items():
        assert [
            line
            for line in lines
            if line.startswith(f"{start} {why}: ") and reason in line
        ], report


@pytest.mark.parametrize(
    "options", [(), ("-n", "2")], ids=["one process", "two workers"]
)
def test_no_more_than_a_few_tests_of_a_run_are_run_again(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    report = run(tmp_path, 0.8, MANY_FAILURES, *options)
    assert "4 failed, 4 passed" in report, report
    assert report.count("\nrun again: ") == 4


@pytest.mark.parametrize(
    ("stolen", "outcome"), [(0.3, "3 failed, 2 passed"), (0.05, "4 failed, 1 passed")]
)
def test_a_small_share_is_no_excuse(
    tmp_path: Path, stolen: float, outcome: str
) -> None:
    assert outcome in (report := run(tmp_path, stolen)), report


@pytest.mark.parametrize(("stolen", "longest"), [(0, 1), (50, 2), (75, 4), (100, 6)])
def test_a_limit_is_longer_by_what_was_stolen(
    monkeypatch: pytest.MonkeyPatch, stolen: int, longest: int
) -> None:
    ticks = iter([(5, 20), (5 + stolen, 120)])
    monkeypatch.setattr(processors, "processor_time", lambda: next(ticks))
    assert Limit(100).left() == pytest.approx(100 * longest, abs=1)


def test_a_limit_ends_on_a_machine_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "processor_time", lambda: (0, 0))
    limit = Limit(0.2)
    time.sleep(0.25)
    assert limit.left() < 0
    # never shorter than was asked for
    assert Limit(3, most_s=1).left() == pytest.approx(3, abs=0.5)
